"""Every Triton kernel against its PyTorch twin, in Triton's interpreter, one process per kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).with_name("interpreted")
CHECKS = sorted(FOLDER.glob("check_*.py"))


def run_checks(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(path)]
    root = FOLDER.parents[2]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=root
    )


def test_every_kernel_has_a_check() -> None:
    kernels = FOLDER.parents[2] / "vtoken_sglang" / "kernels"
    names = {path.stem.removeprefix("triton_") for path in kernels.glob("triton_*.py")}
    assert names
    assert {path.stem.removeprefix("check_") for path in CHECKS} == names


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_kernel_equals_twin(path: Path) -> None:
    done = run_checks(path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_a_wrong_kernel_fails_its_check() -> None:
    """The check of a kernel that is broken on purpose must not pass."""
    done = run_checks(
        FOLDER / "check_apply_moves.py", "-k", "test_deliberately_wrong", "--runxfail"
    )
    assert done.returncode == 1, done.stdout[-2000:]
