"""A miniature `sglang` package: the touched files exactly as released, and its version file.

The installed package may be patched or not; the released bytes are taken from it either way and
proved against the wheel's own RECORD, which the patch tool neither reads nor writes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import shutil
from pathlib import Path

import pytest

from vtoken_sglang import patching
from vtoken_sglang.patch_series import shipped_series


def digests(root: Path) -> dict[str, str]:
    """sha256 of each touched file under `root`."""
    return {
        path: hashlib.sha256((root / path).read_bytes()).hexdigest()
        for path in patching.touched_files()
    }


def tree(root: Path) -> dict[str, bytes]:
    """Every file under `root` but bytecode."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="session")
def record_sha256() -> dict[str, str]:
    """sha256 per file of the released wheel, hex, from the installed dist-info."""
    try:
        record = importlib.metadata.distribution("sglang").read_text("RECORD")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("sglang is not installed")
    assert record is not None
    hashes = {}
    for path, digest, _size in csv.reader(record.splitlines()):
        if path.startswith("sglang/") and digest:
            raw = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=")
            hashes[path.removeprefix("sglang/")] = raw.hex()
    return hashes


@pytest.fixture(scope="session")
def released(record_sha256: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only by convention: the miniature package as released."""
    installed = patching.package_root()
    root = tmp_path_factory.mktemp("released") / "sglang"
    series = shipped_series()
    for patch in patching.status(installed):
        for file in patch.files:
            content = (installed / file.path).read_bytes()
            if file.state is patching.State.APPLIED:
                content = series.restore_content(file.path, content)
            assert hashlib.sha256(content).hexdigest() == record_sha256[file.path]
            (root / file.path).parent.mkdir(parents=True, exist_ok=True)
            (root / file.path).write_bytes(content)
    shutil.copy(installed / "_version.py", root / "_version.py")
    return root


@pytest.fixture
def package(released: Path, tmp_path: Path) -> Path:
    """A copy of the miniature package to work on."""
    root = tmp_path / "sglang"
    shutil.copytree(released, root)
    return root
