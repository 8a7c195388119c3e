"""A pristine SGLang beside a patched one, and a patched one that does nothing by itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patches.conftest import digests
from vtoken_sglang import patching
from vtoken_sglang.errors import HookError
from vtoken_sglang.patch_series import shipped_series

PROBE = Path(__file__).with_name("probe_patched.py")


@pytest.fixture
def full(package: Path) -> Path:
    """The miniature package, patched, with files and folders the series does not touch."""
    (package / "__init__.py").write_text("")
    (package / "srt" / "managers" / "other.py").write_text("value = 1\n")
    (package / "lang").mkdir()
    (package / "lang" / "deep.py").write_text("")
    (package / "srt" / "managers" / "__pycache__").mkdir()
    (package / "srt" / "managers" / "__pycache__" / "other.cpython-311.pyc").write_bytes(b"1")
    (package / "srt" / "managers" / "__pycache__" / "scheduler.cpython-311.pyc").write_bytes(b"2")
    patching.apply(package)
    return package


def test_overlay_holds_released_files_and_links_to_the_rest(full: Path, tmp_path: Path) -> None:
    overlay = patching.stage_pristine_overlay(tmp_path / "stock", full)
    mirror = overlay / "sglang"
    assert digests(mirror) == dict(shipped_series().pristine_sha256)
    assert not (mirror / ".vtoken_patches.json").exists()
    assert (mirror / "lang").is_symlink()
    assert (mirror / "srt/managers/other.py").samefile(full / "srt/managers/other.py")
    assert not (mirror / "srt/managers").is_symlink()
    bytecode = mirror / "srt/managers/__pycache__"
    assert (bytecode / "other.cpython-311.pyc").is_symlink()
    assert all(not path.is_symlink() for path in bytecode.glob("scheduler.*"))
    assert [str(patch.state) for patch in patching.status(mirror)] == ["pristine"] * 3
    patching.check(full)


def test_overlay_of_an_unpatched_package(full: Path, tmp_path: Path) -> None:
    patching.reverse(full)
    overlay = patching.stage_pristine_overlay(tmp_path / "stock", full)
    assert digests(overlay / "sglang") == dict(shipped_series().pristine_sha256)


def test_overlay_is_kept_when_right_and_rebuilt_when_not(full: Path, tmp_path: Path) -> None:
    dest = patching.stage_pristine_overlay(tmp_path / "stock", full)
    witness = dest / "witness"
    witness.touch()
    patching.stage_pristine_overlay(dest, full)
    assert witness.exists()
    patching.apply(dest / "sglang")
    patching.stage_pristine_overlay(dest, full)
    assert not witness.exists()
    assert digests(dest / "sglang") == dict(shipped_series().pristine_sha256)
    other = tmp_path / "elsewhere" / "sglang"
    shutil.copytree(full, other)
    patching.stage_pristine_overlay(dest, other)
    assert (dest / "sglang" / "lang").samefile(other / "lang")


def test_an_empty_folder_is_used_and_any_other_refused(full: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    patching.stage_pristine_overlay(tmp_path / "empty", full)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "note").write_text("mine")
    link = tmp_path / "link"
    link.symlink_to(taken)
    for dest in (taken, taken / "note", link):
        with pytest.raises(HookError, match="is in use"):
            patching.stage_pristine_overlay(dest, full)
    assert (taken / "note").read_text() == "mine"


def test_a_package_changed_by_someone_else_has_no_overlay(full: Path, tmp_path: Path) -> None:
    (full / "srt/managers/scheduler.py").write_text("mine\n")
    with pytest.raises(HookError, match="is modified"):
        patching.stage_pristine_overlay(tmp_path / "stock", full)
    assert not (tmp_path / "stock").exists()


def probe(overlay: Path) -> dict[str, object]:
    """Import SGLang from `overlay` in a fresh process and report what the probe script finds."""
    done = subprocess.run(
        [sys.executable, str(PROBE)],
        env=os.environ | {"PYTHONPATH": str(overlay), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_real_sglang_imports_from_the_overlay_as_released(tmp_path: Path) -> None:
    overlay = patching.stage_pristine_overlay(tmp_path / "stock")
    found = probe(overlay)
    assert found["files"] == [str(overlay / "sglang" / path) for path in patching.touched_files()]
    assert found["patched"] is False


def test_patched_sglang_is_inert_until_a_listener_is_set(tmp_path: Path) -> None:
    overlay = patching.stage_pristine_overlay(tmp_path / "patched")
    patching.apply(overlay / "sglang")
    found = probe(overlay)
    assert found["files"] == [str(overlay / "sglang" / path) for path in patching.touched_files()]
    assert found["patched"] is True
    assert found["inert"] == []
    assert found["heard"] == ["forward", "plan"]
