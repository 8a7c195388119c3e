"""A plugin that only a test installs, beside ours, in the processes of one server."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent


def write_plugin(folder: Path, name: str, body: str) -> None:
    """Write a package whose plugin runs `body` in every process; SGLang finds it once the folder is
    on PYTHONPATH."""
    (folder / f"{name}.py").write_text(f"def load():\n{indent(body, '    ')}\n")
    information = folder / f"{name}-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\n")
    entry = f"[sglang.srt.plugins]\n{name} = {name}:load\n"
    (information / "entry_points.txt").write_text(entry)
