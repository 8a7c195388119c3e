"""Markdown tables, and filling them into a text between marks.

<!-- NAME -->
whatever stands here is replaced
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import FiguresError


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, one line per row."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill(text: str, parts: Mapping[str, str]) -> str:
    """`text` with what stands between the mark of each part and the next end replaced."""
    for name, part in parts.items():
        pattern = rf"(?<=<!-- {re.escape(name)} -->\n).*?(?=<!-- end -->)"
        escaped = part.replace("\\", r"\\")
        # Once: behind an empty match the next one would reach to another mark's end.
        text = re.sub(pattern, f"{escaped}\n", text, count=1, flags=re.DOTALL)
    return text


def fill_file(path: Path, parts: Mapping[str, str]) -> None:
    """`fill` a file in place.

    Raises:
        FiguresError: it cannot be read or written, or has a mark of none of the parts.
    """
    try:
        text = path.read_text("utf-8")
        if not parts:
            raise FiguresError(f"--doc {path}: these figures have no tables")
        marked = [name for name in parts if f"<!-- {name} -->\n" in text]
        if not marked:
            raise FiguresError(f"--doc {path}: has no mark among {', '.join(sorted(parts))}")
        for name in marked:
            if "<!-- end -->" not in text.partition(f"<!-- {name} -->\n")[2]:
                raise FiguresError(f"--doc {path}: the mark {name} has no <!-- end -->")
        path.write_text(fill(text, parts), "utf-8")
    except OSError as error:
        raise FiguresError(f"--doc {path}: {error.strerror}") from error
