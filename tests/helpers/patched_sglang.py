"""A copy of the installed SGLang that a test may change: links, but for the files of the series."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from vtoken_sglang.engine.plugin.installation import package_root

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"


def touched_files() -> list[str]:
    """Files that the series changes, as in `sglang/srt/...`."""
    return [line.split()[1] for line in (PATCHES / "UPSTREAM").read_text().splitlines()[1:]]


def patch(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `scripts/apply_patches.py`."""
    command = [sys.executable, str(ROOT / "scripts" / "apply_patches.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def stage(folder: Path, *own: str) -> Path:
    """Lay out `folder/sglang`, for PYTHONPATH: real folders, links to files and their bytecode.
    Files of the series and those named in `own` (`sglang/...`) are copies. Returns `folder`."""
    installed, copied = package_root(), {*touched_files(), *own}
    stems = {Path(name).stem for name in copied}

    def place(source: str, target: str) -> str:
        name = Path(source).relative_to(installed.parent)
        if str(name) in copied:
            return shutil.copyfile(source, target)
        if name.parent.name != "__pycache__" or name.name.split(".")[0] not in stems:
            Path(target).symlink_to(source)
        return target

    shutil.copytree(installed, folder / "sglang", copy_function=place)
    return folder
