"""Throughput within a latency limit: `sla_tokens_per_s` of a row.

Of the levels of concurrency at which a study was measured, the most output tokens per second with
p95 latency at most 1.05 times the baseline's; 0 where no level has that. The baseline is the arm
native at the level where its own throughput is highest. All of it inside a repeat; a repeat that
lacks a level for either arm is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .compare import runs_of
from .metrics import figure_at, spread

SLA_FACTOR = 1.05
LEVEL = "concurrency"
Result = Mapping[str, Any]


def within_limit(results: Sequence[Result]) -> list[dict[str, dict[str, float]]]:
    """Per result, by arm: median, min, max and `repeats` of the figure; the levels of one family
    share it."""
    families: dict[str, list[Result]] = {}
    for result in results:
        families.setdefault(_family(result), []).append(result)
    found = {key: _of_family(levels) for key, levels in families.items()}
    return [found[_family(result)] for result in results]


def _family(result: Result) -> str:
    setting = result.get("setting", {})
    rest = {key: value for key, value in setting.items() if key != LEVEL}
    return json.dumps([result["workload"]["name"], rest], sort_keys=True)


def _of_family(levels: Sequence[Result]) -> dict[str, dict[str, float]]:
    arms = {str(run["arm"]) for level in levels for run in level["runs"]}
    found = {}
    for arm in arms:
        values = []
        for repeat in _whole_repeats(levels, "native") & _whole_repeats(levels, arm):
            base = [_point(level, "native", repeat) for level in levels]
            limit = SLA_FACTOR * max(base)[1]
            ours = [_point(level, arm, repeat) for level in levels]
            values.append(max((rate for rate, p95 in ours if 0 < p95 <= limit), default=0.0))
        if values:
            found[arm] = {**_short(spread(values)), "repeats": len(values)}
    return found


def _whole_repeats(levels: Sequence[Result], arm: str) -> set[int]:
    """Repeats in which the arm was measured at every level."""
    return set.intersection(*(set(runs_of(level["runs"], arm)) for level in levels))


def _point(level: Result, arm: str, repeat: int) -> tuple[float, float]:
    """Throughput and p95 latency; 0 for what no request gave."""
    summary = runs_of(level["runs"], arm)[repeat]["summary"]
    rate, p95 = figure_at(summary, "output_tokens_per_s"), figure_at(summary, "e2e.p95")
    return rate or 0.0, p95 or 0.0


def _short(figure: Mapping[str, float]) -> dict[str, float]:
    return {key: figure[key] for key in ("median", "min", "max")}
