"""Installing a local distribution into a folder of its own, as a user's installer would."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def install_into(source: Path, folder: Path) -> Path:
    """Install the project at `source` into `folder`/site; returns that, for PYTHONPATH.

    Nothing is downloaded and nothing outside `folder` changes. Raises AssertionError with the
    installer's output when it fails.
    """
    copy = folder / "source"  # building leaves files beside the sources
    shutil.copytree(source, copy)
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(target), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target
