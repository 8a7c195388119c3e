"""An untouched SGLang beside a patched one, for runs that must be stock.

The overlay is a directory that goes first on PYTHONPATH. Its `sglang` consists of links into the
installed package, except for the patched files, which are there as released.
"""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import shutil
import tempfile
from pathlib import Path, PurePosixPath

from vtoken_sglang.errors import HookError
from vtoken_sglang.patch_series import Series, shipped_series
from vtoken_sglang.patch_status import (
    STAMP_NAME,
    State,
    file_statuses,
    package_root,
    patch_statuses,
    refuse_foreign,
    require_release,
)

MARKER_NAME = ".vtoken_pristine_overlay.json"


def stage_pristine_overlay(
    dest: Path, root: Path | None = None, series: Series | None = None
) -> Path:
    """Build the overlay at `dest`, or keep the one there if it is still right.

    Args:
        dest: absent, empty, or an overlay built before.
        root: `sglang` package directory to mirror (default: installed), patched or not.
    Returns: `dest` as an absolute path; set PYTHONPATH to it.
    Raises: HookError when `dest` holds anything else, and on an sglang of another release or
        changed by someone else. Nothing outside `dest` is written.
    """
    series = series or shipped_series()
    root, dest = Path(os.path.abspath(root or package_root())), Path(os.path.abspath(dest))
    require_release(root, series)
    pristine = _pristine_contents(root, series)
    marker = _marker(root, series)
    if (dest / MARKER_NAME).is_file():
        if (dest / MARKER_NAME).read_bytes() == marker and _is_current(dest / "sglang", pristine):
            return dest
        shutil.rmtree(dest)
    elif dest.is_symlink() or (dest.exists() and (not dest.is_dir() or any(dest.iterdir()))):
        raise HookError("pristine-overlay", f"{dest} is in use", "name an empty directory")
    dest.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=dest.parent, prefix=f".{dest.name}."))
    try:
        building.chmod(0o755)
        _mirror(root, building / "sglang", PurePosixPath(), pristine)
        (building / MARKER_NAME).write_bytes(marker)
        os.replace(building, dest)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    for path in pristine:
        py_compile.compile(str(dest / "sglang" / path), doraise=True)
    return dest


def _pristine_contents(root: Path, series: Series) -> dict[PurePosixPath, bytes]:
    files = file_statuses(root, series)
    refuse_foreign(root, series, patch_statuses(series, files))
    contents = {}
    for path, file in files.items():
        content = (root / path).read_bytes()
        if file.state is State.APPLIED:
            content = series.restore_content(path, content)
        contents[PurePosixPath(path)] = content
    return contents


def _marker(root: Path, series: Series) -> bytes:
    # Links go by path, so they outlive a reinstall of the same release at the same place.
    files = dict(series.pristine_sha256)
    return json.dumps({"source": str(root), "sglang": series.version, "files": files}).encode()


def _is_current(package: Path, pristine: dict[PurePosixPath, bytes]) -> bool:
    return all(
        (package / path).is_file()
        and hashlib.sha256((package / path).read_bytes()).digest()
        == hashlib.sha256(content).digest()
        for path, content in pristine.items()
    )


def _mirror(
    source: Path, target: Path, below: PurePosixPath, pristine: dict[PurePosixPath, bytes]
) -> None:
    """Fill `target/below`: real directories on the way to a pristine file, links for the rest."""
    (target / below).mkdir()
    parents = {parent for path in pristine for parent in path.parents}
    for entry in sorted((source / below).iterdir()):
        path = below / entry.name
        if path in pristine:
            (target / path).write_bytes(pristine[path])
        elif path in parents:
            _mirror(source, target, path, pristine)
        elif entry.name == "__pycache__":
            stems = {file.stem for file in pristine if file.parent == below}
            (target / path).mkdir()
            for compiled in entry.iterdir():
                if compiled.name.split(".")[0] not in stems:
                    (target / path / compiled.name).symlink_to(compiled)
        elif entry.name != STAMP_NAME:
            (target / path).symlink_to(entry)
