"""Every Triton kernel against its PyTorch reference, in Triton's interpreter, one process per
kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.interpreted import ROOT, assert_passes, run_interpreted

pytest.importorskip("triton")
FOLDER = Path(__file__).with_name("interpreted")
CHECKS = sorted(FOLDER.glob("check_*.py"))


def test_every_kernel_has_a_check() -> None:
    kernels = ROOT / "vtoken_sglang" / "kernels"
    names = {path.parent.name for path in kernels.glob("*/triton.py")}
    assert names
    assert {path.stem.removeprefix("check_") for path in CHECKS} == names


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_kernel_equals_reference(path: Path) -> None:
    assert_passes(path)


def test_a_wrong_kernel_fails_its_check() -> None:
    """The check of a kernel that is broken on purpose must not pass."""
    options = ("-k", "test_deliberately_wrong", "--runxfail")
    done = run_interpreted(FOLDER / "check_pack_live.py", *options)
    assert done.returncode == 1, done.stdout[-2000:]
