"""Numbers as they are written and summarised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy


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


def spread(values: Sequence[float]) -> dict[str, float]:
    """median, min, max, q1 and q3 of a figure over repeats.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("values: at least one is needed, got none")
    array = numpy.asarray(values, dtype=numpy.float64)
    q1, median, q3 = numpy.percentile(array, (25, 50, 75))
    return {
        "median": float(median),
        "min": float(array.min()),
        "max": float(array.max()),
        "q1": float(q1),
        "q3": float(q3),
    }


def figure(values: Sequence[float], unit: str) -> dict[str, Any]:
    """An entry of a figures file: median over repeats, with quartiles and extremes."""
    found = spread(values)
    shown = {key: found[key] for key in ("min", "q1", "q3", "max")}
    return {"value": found["median"], "unit": unit, "spread": shown}
