"""Numbers as they are written."""

from __future__ import annotations

import math
from typing import Any


def rounded(value: Any) -> Any:
    """The same data with floats cut to 7 significant digits and tuples as lists."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def number(value: Any, digits: int = 3) -> str:
    """`value` with so many significant digits and no exponent; a dash for none."""
    if value is None or math.isnan(value):
        return "-"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
