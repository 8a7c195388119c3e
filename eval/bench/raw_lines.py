"""Raw measurements, one JSON object a line, as the benches append them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vtoken_sglang_eval.errors import FiguresError


def read_lines(raw: Path) -> list[dict[str, Any]]:
    """Every line; none where there is no such file.

    Raises:
        FiguresError: a line is cut off or is something else.
    """
    if not raw.exists():
        return []
    found = []
    for number, line in enumerate(raw.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise FiguresError(f"{raw}: line {number} is cut off; delete it ({error})") from error
        if not isinstance(entry, dict):
            raise FiguresError(f"{raw}: line {number} is not a measurement")
        found.append(entry)
    return found
