"""Run a file of tests in a process whose Triton interprets its kernels.

Triton decides when a kernel's module is imported, so a process either interprets or compiles.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on `path`, a file that the suite itself does not collect."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, *options, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def assert_passes(path: Path) -> None:
    """Fail with the end of its output unless every check of `path` passes."""
    done = run_interpreted(path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
