"""Figures of the shared-prefix bench from made-up runs: what is compared with what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.bench.sharing_figures import (
    GRIDS,
    METRICS,
    figures_of,
    next_repeat,
    read_runs,
)
from vtoken_sglang_eval.bench.sharing_runs import STRATEGIES
from vtoken_sglang_eval.errors import FiguresError

FAST = {"none": 1.0, "skip": 2.0, "mask": 4.0, "cow": 3.0, "auto": 3.0}


def runs_of(grid: str, repeats: int = 2, **speeds: float) -> list[dict[str, Any]]:
    """Each strategy at its speed, everywhere, except that repeat 1 is twice as fast for all."""
    found = []
    for repeat in range(repeats):
        for one in GRIDS[grid].cells:
            for strategy in GRIDS[grid].strategies:
                run = {**dict.fromkeys(METRICS, 1.0), "probe": [1, 2], "strategy": strategy}
                run["throughput"] = {**FAST, **speeds}[strategy] * (1 + repeat)
                found.append({**run, "cell": one.name, "repeat": repeat})
    return found


def test_auto_is_compared_with_the_best_of_the_others_within_a_repeat() -> None:
    found = figures_of(GRIDS["short"], runs_of("short"))
    assert found["auto_vs_best_min"]["value"] == pytest.approx(0.75)  # of mask
    assert found["auto_vs_best_min"]["spread"]["max"] == pytest.approx(0.75)
    assert found["auto_vs_skip_degree8"]["value"] == pytest.approx(1.5)
    assert found["neighbour_mismatches"]["value"] == 0
    better = figures_of(GRIDS["short"], runs_of("short", auto=8.0))
    assert better["auto_vs_best_min"]["value"] == pytest.approx(2.0)


def test_a_probe_that_differs_is_counted() -> None:
    runs = runs_of("short")
    runs[1]["probe"] = [1, 3]
    assert figures_of(GRIDS["short"], runs)["neighbour_mismatches"]["value"] == 1


def test_another_grid_leaves_the_figures_by_degree_alone() -> None:
    found = figures_of(GRIDS["long"], runs_of("long"), "_long")
    assert "auto_vs_best_min_long" in found
    assert not found.keys() & {"auto_vs_best_min", "neighbour_mismatches", "auto_vs_skip_degree1"}


def test_near_strategies_are_compared_in_pairs() -> None:
    found = figures_of(GRIDS["near"], runs_of("near", auto=5.0))
    name = f"auto_vs_mask_pairs_{GRIDS['near'].cells[0].name}"
    assert found[name]["value"] == pytest.approx(1.25)
    assert "2 pairs" in found[name]["unit"]


def test_a_cell_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    raw = tmp_path / "runs.jsonl"
    assert next_repeat(raw) == 0
    runs = runs_of("short", repeats=1)
    raw.write_text("\n".join(map(json.dumps, runs[:-1])))
    assert len(read_runs(raw, len(STRATEGIES))) == len(runs) - len(STRATEGIES)
    assert next_repeat(raw) == 1
    with pytest.raises(FiguresError, match="never measured"):
        figures_of(GRIDS["short"], read_runs(raw, len(STRATEGIES)))
