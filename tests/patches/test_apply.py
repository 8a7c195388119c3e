"""Applying and reversing on disk: idempotent, all or none, never through a hard link."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import stat
from pathlib import Path

import pytest

from tests.patches.conftest import digests, tree
from vtoken_sglang import patch_writer, patching
from vtoken_sglang.errors import HookError
from vtoken_sglang.patch_series import shipped_series
from vtoken_sglang.patch_status import STAMP_NAME

SCHEDULER = "srt/managers/scheduler.py"
PLAN = "srt/mem_cache/kv_loc_plan.py"
FORWARD_BATCH = "srt/model_executor/forward_batch_info.py"


def states(root: Path) -> list[str]:
    return [str(patch.state) for patch in patching.status(root)]


def test_apply_check_reverse(package: Path, released: Path) -> None:
    assert states(package) == ["pristine"] * 3
    with pytest.raises(HookError, match="not applied to sglang/srt/managers/scheduler.py") as error:
        patching.check(package)
    assert error.value.remedy == "run `vtoken-sglang patch --apply`"
    assert patching.apply(package)
    assert states(package) == ["applied"] * 3
    assert [str(patch.state) for patch in patching.check(package)] == ["applied"] * 3
    assert patching.reverse(package)
    assert states(package) == ["pristine"] * 3
    assert tree(package) == tree(released)


def test_apply_twice_and_reverse_twice_do_nothing_more(package: Path, released: Path) -> None:
    assert patching.apply(package)
    once, inodes = tree(package), {path: path.stat().st_ino for path in package.rglob("*.*")}
    assert not patching.apply(package)
    assert tree(package) == once
    assert {path: path.stat().st_ino for path in package.rglob("*.*")} == inodes
    assert patching.reverse(package)
    assert not patching.reverse(package)
    assert tree(package) == tree(released)


def test_stamp_names_series_and_patched_files(package: Path) -> None:
    patching.apply(package)
    stamp = json.loads((package / STAMP_NAME).read_text())
    assert stamp == {
        "sglang": "0.5.23",
        "series_sha256": patching.series_hash(),
        "files": digests(package),
    }


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[1]", b'{"series_sha256": "0"}'])
def test_check_wants_the_stamp_and_apply_repairs_it(package: Path, content: bytes | None) -> None:
    patching.apply(package)
    stamp = package / STAMP_NAME
    whole = stamp.read_bytes()
    stamp.unlink()
    if content is not None:
        stamp.write_bytes(content)
    with pytest.raises(HookError, match="missing or names another series"):
        patching.check(package)
    assert patching.apply(package)
    assert stamp.read_bytes() == whole
    patching.check(package)


def test_a_stamp_left_by_a_reinstall_does_not_count(package: Path, released: Path) -> None:
    patching.apply(package)
    for path in patching.touched_files():
        (package / path).write_bytes((released / path).read_bytes())
    assert states(package) == ["pristine"] * 3
    with pytest.raises(HookError, match="patch is not applied"):
        patching.check(package)
    assert patching.apply(package)
    patching.check(package)


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("action", [patching.check, patching.apply, patching.reverse])
def test_a_file_changed_by_someone_else_is_refused(action, applied: bool, package: Path) -> None:
    if applied:
        patching.apply(package)
    expected = shipped_series().pristine_sha256[PLAN][:12]
    (package / PLAN).write_bytes((package / PLAN).read_bytes() + b"# mine\n")
    before, got = tree(package), digests(package)[PLAN][:12]
    with pytest.raises(HookError, match=rf"sglang/{PLAN} is modified.*{expected}.*{got}") as error:
        action(package)
    assert error.value.hook == "plan-kv-lens"
    assert "reinstall sglang==0.5.23" in error.value.remedy
    assert tree(package) == before


def test_one_file_patched_and_one_changed_is_refused(package: Path) -> None:
    patching.apply(package)
    (package / SCHEDULER).write_text("nothing left\n")
    assert states(package) == ["modified", "applied", "applied"]
    for action in (patching.apply, patching.reverse):
        with pytest.raises(HookError, match=f"sglang/{SCHEDULER} is modified"):
            action(package)


def test_a_missing_file_is_refused(package: Path) -> None:
    (package / PLAN).unlink()
    before = tree(package)
    assert states(package) == ["pristine", "pristine", "missing"]
    for action in (patching.check, patching.apply, patching.reverse):
        with pytest.raises(HookError, match=f"sglang/{PLAN} is missing.*got no file"):
            action(package)
    assert tree(package) == before


@pytest.mark.parametrize("finish", ["apply", "reverse"])
def test_a_run_that_was_cut_off_is_completed(finish: str, package: Path, released: Path) -> None:
    patched = shipped_series().patch_content(PLAN, (package / PLAN).read_bytes())
    (package / PLAN).write_bytes(patched)
    assert states(package) == ["pristine", "pristine", "partial"]
    with pytest.raises(HookError, match=r"not applied to sglang/srt/managers/scheduler\.py"):
        patching.check(package)
    if finish == "apply":
        assert patching.apply(package)
        patching.check(package)
    else:
        assert patching.reverse(package)
        assert tree(package) == tree(released)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23.dev1", None])
def test_another_release_is_refused(version: str | None, package: Path) -> None:
    file = package / "_version.py"
    if version is None:
        file.unlink()
    else:
        file.write_text(f"__version__ = version = '{version}'\n")
    before = tree(package)
    for action in (patching.check, patching.apply, patching.reverse):
        with pytest.raises(HookError, match=rf"{version or 'no sglang release'}.*not 0\.5\.23"):
            action(package)
    assert tree(package) == before


def test_a_hard_linked_reference_stays_as_released(package: Path, released: Path) -> None:
    cache = package.parent / "cache"
    cache.mkdir()
    references = {path: cache / Path(path).name for path in patching.touched_files()}
    for path, reference in references.items():
        os.link(package / path, reference)
    for action in (patching.apply, patching.reverse):
        assert action(package)
        for path, reference in references.items():
            assert reference.read_bytes() == (released / path).read_bytes()
            assert not reference.samefile(package / path)


def test_file_modes_are_kept(package: Path) -> None:
    modes = {SCHEDULER: 0o755, PLAN: 0o640}
    for path, mode in modes.items():
        (package / path).chmod(mode)
    for action in (patching.apply, patching.reverse):
        action(package)
        for path, mode in modes.items():
            assert stat.S_IMODE((package / path).stat().st_mode) == mode


@pytest.mark.parametrize("action", [patching.apply, patching.reverse])
@pytest.mark.parametrize("fail_at", range(6))
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_half_way_undoes_everything(
    action, fail_at: int, failure: BaseException, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if action is patching.reverse:
        patching.apply(package)
    before, calls, replace = tree(package), 0, patch_writer._replace

    def fail_once(path: Path, content: bytes | None) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at + 1:
            raise failure
        replace(path, content)

    monkeypatch.setattr(patch_writer, "_replace", fail_once)
    with pytest.raises(HookError if isinstance(failure, OSError) else KeyboardInterrupt) as error:
        action(package)
    if isinstance(failure, OSError):
        assert "No space left on device); nothing was changed" in str(error.value)
    assert calls > fail_at
    assert tree(package) == before


def test_a_failed_swap_leaves_no_temporary_file(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(package)

    def fail(source: str, target: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(HookError, match="Operation not permitted"):
        patching.apply(package)
    assert tree(package) == before


def test_an_undo_that_fails_names_the_files(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, replace = 0, patch_writer._replace

    def fail_from_third(path: Path, content: bytes | None) -> None:
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise OSError(5, "Input/output error")
        replace(path, content)

    monkeypatch.setattr(patch_writer, "_replace", fail_from_third)
    with pytest.raises(HookError, match=r"could not put back .*schedule_batch\.py .*scheduler\.py"):
        patching.apply(package)


def test_bytecode_never_outlives_its_source(package: Path) -> None:
    """Same mtime, same size: the import system alone would take the stale bytecode."""
    source = package / "module.py"
    source.write_text("value = 1\n")
    os.utime(source, (10, 10))
    compiled = Path(py_compile.compile(str(source), doraise=True))
    other = compiled.with_name("module.cpython-37.pyc")
    other.write_bytes(b"of another interpreter")
    patch_writer.replace_files({source: b"value = 2\n"})
    os.utime(source, (10, 10))
    assert not other.exists()
    assert compiled.exists()
    spec = importlib.util.spec_from_file_location("module", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.value == 2


def test_no_bytecode_is_made_where_there_was_none(package: Path) -> None:
    patching.apply(package)
    assert not list(package.rglob("*.pyc"))
