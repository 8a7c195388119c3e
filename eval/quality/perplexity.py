"""Perplexity of real text behind a prompt that was pruned, and went on being pruned.

Every policy reads the same continuation; the first look comes when the prompt has been read, the
next ones every `INTERVAL` tokens. The first token of the continuation, expected before anything
was pruned, does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from .cells import FULL, Cell
from .reference import ReferenceModel
from .rows import Deadline, Rows
from .runs import beginning, branch, read_on

PROMPT: Final = 1024
CONTINUATION: Final = 256
INTERVAL: Final = 64
SETTINGS: Final = {
    "prompt_tokens": PROMPT,
    "continuation_tokens": CONTINUATION,
    "interval": INTERVAL,
}


def measure(
    model: ReferenceModel,
    texts: Sequence[Sequence[int]],
    cells: Sequence[Cell],
    rows: Rows,
    deadline: Deadline,
) -> bool:
    """Read every text that `rows` lacks; returns whether all are there."""
    for number, text in enumerate(texts):
        if str(number) in rows.found:
            continue
        if deadline.passed:
            return False
        options = [cell.options(INTERVAL, seed=number) for cell in cells]
        prompt, rest = text[:PROMPT], text[PROMPT:]
        lanes, _ = branch(beginning(model, prompt, options), prompt, options, len(rest))
        readings = read_on(lanes, options, rest, step=INTERVAL)
        found = {cell.name: asdict(one) for cell, one in zip(cells, readings, strict=True)}
        rows.add(str(number), found)
        print(f"perplexity: text {number + 1} of {len(texts)}", flush=True)
    return True


def figures(rows: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Figures of all texts: perplexity, and its ratio to full attention, over texts."""
    names = list(next(iter(rows.values())))
    by_cell = {name: np.array([row[name]["surprise"] for row in rows.values()]) for name in names}
    full = by_cell[FULL.name]
    found: dict[str, dict[str, Any]] = {}
    for name, surprise in by_cell.items():
        found[f"perplexity_{name}"] = _figure(np.exp(surprise), float(np.exp(surprise.mean())), "")
        if name != FULL.name:
            ratio = surprise - full
            found[f"perplexity_ratio_{name}"] = _figure(
                np.exp(ratio), float(np.exp(ratio.mean())), " / full attention's"
            )
    return found


def _figure(each: np.ndarray, value: float, unit: str) -> dict[str, Any]:
    low, q1, q3, high = np.percentile(each, (0, 25, 75, 100)).tolist()
    return {
        "value": value,
        "unit": f"perplexity{unit} (geometric mean over texts; spread over texts)",
        "spread": {"min": low, "q1": q1, "q3": q3, "max": high, "texts": len(each)},
    }
