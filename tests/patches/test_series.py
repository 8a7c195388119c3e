"""The shipped series: list, patches, header, UPSTREAM and the released wheel agree."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vtoken_sglang import SUPPORTED_SGLANG_VERSION, patching
from vtoken_sglang.errors import HookError
from vtoken_sglang.patch_series import HEADER_FIELDS, Series, load_series, shipped_series

MAX_CHANGED_LINES = 40
SOURCE = Path(__file__).parents[2] / "patches"


def test_expected_patches_are_shipped_as_package_data() -> None:
    names = [patch.name for patch in shipped_series().patches]
    assert names == ["forward-done-listener", "kv-reclaimed-tokens", "plan-kv-lens"]


def test_shipped_package_data_is_this_checkout() -> None:
    assert load_series(SOURCE) == shipped_series()


@pytest.mark.parametrize("patch", shipped_series().patches, ids=lambda patch: patch.name)
def test_each_patch_has_its_header_and_is_small(patch) -> None:
    assert set(patch.header) == set(HEADER_FIELDS)
    assert all(len(value) > 1 for value in patch.header.values())
    assert patch.header["Base"] == f"sglang {SUPPORTED_SGLANG_VERSION}"
    assert 0 < patch.changed_lines <= MAX_CHANGED_LINES


def test_upstream_hashes_are_those_of_the_released_wheel(record_sha256: dict[str, str]) -> None:
    for path, sha256 in shipped_series().pristine_sha256.items():
        assert sha256 == record_sha256[path], path


def test_every_patch_applies_and_reverses_byte_identically(released: Path) -> None:
    series = shipped_series()
    for path in patching.touched_files():
        pristine = (released / path).read_bytes()
        patched = series.patch_content(path, pristine)
        assert patched != pristine
        assert series.restore_content(path, patched) == pristine


def test_patches_change_nothing_but_what_they_add(released: Path) -> None:
    """Only one line of SGLang is taken away: the return of `kv_private_tokens`."""
    removed = []
    for patch in shipped_series().patches:
        for diff in patch.diffs:
            for hunk in diff.hunks:
                new = list(hunk.new_lines)
                for line in hunk.old_lines:
                    if line in new:
                        new.remove(line)
                    else:
                        removed.append(line.strip())
    assert removed == [
        b"return ceil_align(kv.kv_allocated_len, page_size) - kv.cache_protected_len"
    ]


def test_patched_files_compile(released: Path) -> None:
    series = shipped_series()
    for path in patching.touched_files():
        compile(series.patch_content(path, (released / path).read_bytes()), path, "exec")


def test_series_hash_covers_every_byte_of_series_and_patches(tmp_path: Path) -> None:
    seen = {shipped_series().sha256}
    for name in ("series", *(f"{patch.name}.patch" for patch in shipped_series().patches)):
        directory = _copy(tmp_path / name)
        data = (directory / name).read_bytes()
        comment = b"# note\n" + data if name == "series" else data.replace(b": ", b":  ", 1)
        (directory / name).write_bytes(comment.replace(b":  ", b": A ", 1))
        seen.add(load_series(directory).sha256)
    assert len(seen) == 2 + len(shipped_series().patches)
    assert patching.series_hash() == shipped_series().sha256


def _copy(target: Path) -> Path:
    shutil.copytree(SOURCE, target)
    return target


def _edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def edit(directory: Path) -> None:
        text = (directory / name).read_text()
        assert old in text
        (directory / name).write_text(text.replace(old, new, 1))

    return edit


def _unlist(directory: Path) -> None:
    _edit("series", "plan-kv-lens.patch\n", "")(directory)


def _delete(directory: Path) -> None:
    (directory / "plan-kv-lens.patch").unlink()


PLAN = "plan-kv-lens.patch"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "patch not listed": (_unlist, "series"),
    "listed patch absent": (_delete, "series"),
    "patch listed twice": (_edit("series", PLAN, f"{PLAN}\n{PLAN}"), "series"),
    "no series": (lambda d: (d / "series").unlink(), "series"),
    "no UPSTREAM": (lambda d: (d / "UPSTREAM").unlink(), "UPSTREAM"),
    "other release": (_edit("UPSTREAM", "sglang 0.5.23", "sglang 0.5.24"), "UPSTREAM"),
    "file without hash": (_edit("UPSTREAM", "srt/mem_cache", "srt/mem_cachet"), "UPSTREAM"),
    "malformed hash": (_edit("UPSTREAM", "\n0", "\nx"), "UPSTREAM"),
    "header field gone": (_edit(PLAN, "Remove-when:", "Removed:"), "plan-kv-lens"),
    "other base": (_edit(PLAN, "Base: sglang 0.5.23", "Base: sglang 0.5.22"), "plan-kv-lens"),
    "stray header text": (_edit(PLAN, "Base:", "hello\nBase:"), "plan-kv-lens"),
    "outside sglang": (_edit(PLAN, "a/sglang/srt/mem", "a/other/srt/mem"), "plan-kv-lens"),
    "hunk count wrong": (_edit(PLAN, "@@ -47,10", "@@ -47,11"), "plan-kv-lens"),
    "added line dropped": (_edit(PLAN, "+    ] = None\n", ""), "plan-kv-lens"),
    "cut off": (lambda d: (d / PLAN).write_text((d / PLAN).read_text()[:-3]), "plan-kv-lens"),
}


@pytest.mark.parametrize("defect", BROKEN)
def test_a_broken_series_is_refused_by_name(defect: str, tmp_path: Path) -> None:
    break_it, at_fault = BROKEN[defect]
    directory = _copy(tmp_path / "patches")
    break_it(directory)
    with pytest.raises(HookError) as refusal:
        load_series(directory)
    assert refusal.value.hook == at_fault


TAMPERED = {
    "line number": _edit(PLAN, "@@ -47,10 +47,12", "@@ -48,10 +48,12"),
    "new line number": _edit(PLAN, "@@ -121,6 +123,11", "@@ -121,6 +124,11"),
    "context": _edit(PLAN, " if TYPE_CHECKING:", " if TYPE_CHECKIN:"),
}


@pytest.mark.parametrize("defect", TAMPERED)
def test_a_patch_that_does_not_fit_exactly_changes_nothing(
    defect: str, package: Path, tmp_path: Path
) -> None:
    directory = _copy(tmp_path / "patches")
    TAMPERED[defect](directory)
    before = {path: path.read_bytes() for path in package.rglob("*.py")}
    with pytest.raises(HookError, match=r"hook plan-kv-lens: does not fit sglang/srt/mem_cache"):
        patching.apply(package, load_series(directory))
    assert {path: path.read_bytes() for path in package.rglob("*.py")} == before
    assert not (package / ".vtoken_patches.json").exists()


def tampered_series(directory: Path) -> Series:
    """A series that is well formed and fits, but adds something else."""
    _copy(directory)
    _edit(PLAN, "+        kv_loc_plan.fill_kv_lens(batch, ret)", "+        pass")(directory)
    return load_series(directory)


def test_files_patched_by_another_series_are_refused(package: Path, tmp_path: Path) -> None:
    other = tampered_series(tmp_path / "patches")
    assert patching.apply(package, other)
    file = package / "srt/model_executor/forward_batch_info.py"
    got = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    for action in (patching.check, patching.apply, patching.reverse):
        with pytest.raises(HookError, match=f"got {got}; .*another version") as refusal:
            action(package)
        assert refusal.value.hook == "plan-kv-lens"
    assert patching.reverse(package, other)
    assert patching.apply(package)
