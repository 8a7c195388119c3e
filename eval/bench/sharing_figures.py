"""Shared prefixes under skip, mask, cow and auto, all on one server per repeat: topic `cow`.

    python -m vtoken_sglang_eval.bench.sharing_figures --out docs/results/cow.json \
        --raw build/cow_runs.jsonl --repeats 3

Runs are appended to the raw file, one JSON line per cell, strategy and repeat; a later call adds
repeats to those that are there, so a measurement may be taken in pieces. Figures are computed from
all of it. Ratios are taken within a repeat, where the strategies follow each other in rotating
order, and summarised by their median.

  auto_vs_best_min               least of auto / best of skip, mask, cow (median throughput ratio)
                                 over the grid's cells; `_long` for the grid of that name
  auto_vs_skip_degreeN           auto / skip, throughput, prefix 512, keep 0.3, random
  retained_ratio_auto_degree8    auto / none, tokens held per running request
  neighbour_mismatches           unpruned requests that answered otherwise after a pruned burst
                                 (`_long` likewise)
  STRATEGY_METRIC_CELL           the grid; auto_vs_best_CELL, auto_vs_skip_CELL
  auto_vs_mask_pairs_CELL        grid "near": auto / mask, in turns on one server
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.bench.raw_lines import read_lines
from vtoken_sglang_eval.bench.sharing_runs import ANSWER, STRATEGIES, TAIL, Cell, SharingClient
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.metrics import figure
from vtoken_sglang_eval.models import ensure_smollm2
from vtoken_sglang_eval.server import HOST, ServerProcess, free_port

MODULE = "vtoken_sglang_eval.bench.sharing_figures"
PAGE_SIZE = 16
OTHERS = ("skip", "mask", "cow")
DEGREES = (1, 2, 4, 8, 16)


def cell(degree: int, prefix: int, keep: float, policy: str, least: int) -> Cell:
    return Cell(degree=degree, prefix=prefix, keep=keep, policy=policy, least=least)


def by_degree(least: int) -> tuple[Cell, ...]:
    """The cells that the figures by degree are of."""
    return tuple(cell(degree, 512, 0.3, "random", least) for degree in DEGREES)


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured, on a pool of so many tokens: too small for every request unshared.

    Fields:
        by_degree: the first cells are those that the figures by degree are of.
        strategies: what follows each other in every cell. rounds: how often, on one server; each
            counts as a repeat.
    """

    pool: int
    cells: tuple[Cell, ...]
    by_degree: bool = True
    strategies: tuple[str, ...] = STRATEGIES
    rounds: int = 1


GRIDS = {
    "short": Grid(
        2048,
        (
            *by_degree(4),
            *(cell(degree, 512, 0.5, "streaming_llm", 4) for degree in (1, 4, 8)),
            cell(16, 512, 0.5, "random", 4),
            cell(8, 1024, 0.3, "random", 4),
        ),
    ),
    "long": Grid(
        6144,
        (cell(4, 2048, 0.3, "random", 4), cell(4, 4096, 0.3, "random", 4)),
        by_degree=False,
    ),
    "near": Grid(  # two strategies that do almost the same there, told apart by many pairs
        2048,
        tuple(cell(degree, 512, 0.3, "random", 4) for degree in (4, 8, 16)),
        by_degree=False,
        strategies=("mask", "auto"),
        rounds=4,
    ),
    "full": Grid(
        4096,
        (
            *by_degree(8),
            *(cell(degree, 512, 0.3, "streaming_llm", 8) for degree in (1, 4, 8)),
            *(cell(degree, 512, 0.5, "random", 8) for degree in (1, 8)),
            *(cell(degree, 1024, 0.3, "random", 8) for degree in (2, 8)),
            *(cell(degree, 2048, 0.3, "random", 8) for degree in (4, 8)),
        ),
    ),
}
METRICS = {
    "throughput": "requests/s",
    "ttft_p50": "s",
    "ttft_p95": "s",
    "e2e_p95": "s",
    "used_mean": "tokens held by running requests, mean",
    "used_peak": "tokens held by running requests, peak",
    "used_each": "tokens held per running request",
    "running_mean": "requests running",
    "cached_share": "share of prompt tokens",
    "cpu_s": "CPU seconds of the server",
    "forks": "forks",
    "moved": "tokens copied",
    "retracted": "retractions",
}
Figures = dict[str, dict[str, Any]]


def serve_repeat(grid: Grid, model: str, repeat: int, seed: int, raw: Path) -> None:
    """One server, every cell and strategy; each run is appended to `raw` as it ends."""
    port = free_port()
    command = [sys.executable, "-m", "vtoken_sglang.cli", "serve", "--model-path", model]
    command += ["--host", HOST, "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    command += ["--sleep-on-idle", "--enable-metrics", "--decode-log-interval", "4"]
    command += ["--page-size", str(PAGE_SIZE), "--max-total-tokens", str(grid.pool)]
    command += ["--vtoken-policy", "streaming_llm", "--vtoken-keep", "1.0"]
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(
            command, port, Path(folder) / "server.log", {"OMP_NUM_THREADS": "1"}
        ) as server,
    ):
        client = SharingClient(server.base_url, server.cpu_seconds)
        client.run(grid.cells[0], "auto", seed - 1)  # warm-up
        for number in range(repeat, repeat + grid.rounds):
            _run_cells(client, grid, number, seed, raw)


def _run_cells(client: SharingClient, grid: Grid, repeat: int, seed: int, raw: Path) -> None:
    start = repeat * 3 % len(grid.cells)  # one that is cut short misses other cells each time
    for number, one in enumerate((*grid.cells[start:], *grid.cells[:start])):
        turn = (repeat + number) % len(grid.strategies)
        for strategy in (*grid.strategies[turn:], *grid.strategies[:turn]):
            run = client.run(one, strategy, seed + repeat)
            line = {"cell": one.name, "repeat": repeat, **run.as_dict()}
            with raw.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(
                f"  {repeat} {one.name:44} {strategy:5} {run.throughput:6.3f} req/s "
                f"used {run.used_mean:6.0f} cpu {run.cpu_s:5.1f} s forks {run.forks}",
                flush=True,
            )


def read_runs(raw: Path, strategies: int) -> list[dict[str, Any]]:
    """Every run whose cell has all `strategies` in that repeat: one may have been cut short."""
    runs = read_lines(raw)
    seen = Counter((run["repeat"], run["cell"]) for run in runs)
    return [run for run in runs if seen[run["repeat"], run["cell"]] == strategies]


def next_repeat(raw: Path) -> int:
    """Number of the next repeat; one that was cut short counts."""
    return 1 + max((line["repeat"] for line in read_lines(raw)), default=-1)


def repeats_of(grid: Grid, runs: Sequence[dict[str, Any]]) -> int:
    """The fewest repeats that any cell has."""
    return min(
        len({run["repeat"] for run in runs if run["cell"] == one.name}) for one in grid.cells
    )


def ratios(
    runs: Sequence[dict[str, Any]], cell: str, metric: str, ours: str, other: str
) -> list[float]:
    """ours / other per repeat."""
    value = {(run["repeat"], run["strategy"]): run[metric] for run in runs if run["cell"] == cell}
    repeats = sorted({repeat for repeat, _ in value})
    return [value[repeat, ours] / value[repeat, other] for repeat in repeats]


def figures_of(grid: Grid, runs: Sequence[dict[str, Any]], suffix: str = "") -> Figures:
    """All figures. Raises FiguresError when a cell was never measured.

    Args:
        suffix: of the names of the figures over all cells, so that two grids fit in one file.
    """
    if not repeats_of(grid, runs):
        raise FiguresError("figures: not written, some cell was never measured")
    if grid.strategies != STRATEGIES:
        return pair_figures(grid, runs)
    found: Figures = {}
    least: dict[str, Any] | None = None
    for one in grid.cells:
        # The best of the others is chosen by its median, not anew in every repeat: the best of
        # three noisy numbers is above all of them even where nothing differs.
        against = {
            other: figure(ratios(runs, one.name, "throughput", "auto", other), "auto / " + other)
            for other in OTHERS
        }
        best = min(against, key=lambda other: float(against[other]["value"]))
        entry = {**against[best], "unit": f"throughput, auto / {best}, {one.name}"}
        found[f"auto_vs_best_{one.name}"] = entry
        found[f"auto_vs_skip_{one.name}"] = against["skip"]
        cpu = [figure(ratios(runs, one.name, "cpu_s", o, "auto"), "") for o in OTHERS]
        slowest = min(cpu, key=lambda found_one: float(found_one["value"]))
        found[f"auto_vs_best_cpu_{one.name}"] = {**slowest, "unit": "CPU time, best other / auto"}
        if least is None or entry["value"] < least["value"]:
            least = entry
        for strategy in STRATEGIES:
            mine = [r for r in runs if r["cell"] == one.name and r["strategy"] == strategy]
            for metric, unit in METRICS.items():
                values = [float(run[metric]) for run in mine]
                found[f"{strategy}_{metric}_{one.name}"] = figure(values, unit)
    assert least is not None
    found[f"auto_vs_best_min{suffix}"] = least
    for degree, one in zip(DEGREES if grid.by_degree else (), grid.cells, strict=False):
        name = one.name
        unit = "throughput, auto / skip"
        found[f"auto_vs_skip_degree{degree}"] = {**found[f"auto_vs_skip_{name}"], "unit": unit}
        for ours in ("skip", "mask", "cow", "auto"):
            found[f"retained_ratio_{ours}_degree{degree}"] = figure(
                ratios(runs, name, "used_each", ours, "none"),
                f"tokens held per running request, {ours} / none",
            )
    wrong = neighbour_mismatches(runs)
    found[f"neighbour_mismatches{suffix}"] = {"value": wrong, "unit": "answers", "spread": None}
    return found


def pair_figures(grid: Grid, runs: Sequence[dict[str, Any]]) -> Figures:
    """Second strategy / first, cell by cell, over all pairs."""
    first, second = grid.strategies
    found: Figures = {}
    for one in grid.cells:
        name = f"{second}_vs_{first}_pairs_{one.name}"
        ours = ratios(runs, one.name, "throughput", second, first)
        found[name] = figure(ours, f"throughput, {second} / {first}, {len(ours)} pairs")
        cpu = ratios(runs, one.name, "cpu_s", first, second)
        found[f"{name}_cpu"] = figure(cpu, f"CPU time, {first} / {second}, {len(cpu)} pairs")
    return found


def neighbour_mismatches(runs: Sequence[dict[str, Any]]) -> int:
    """Probes after a pruned burst that differ from the one after an unpruned burst."""
    truth = {(r["cell"], r["repeat"]): r["probe"] for r in runs if r["strategy"] == "none"}
    return sum(run["probe"] != truth[run["cell"], run["repeat"]] for run in runs)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="figures file, topic cow")
    parser.add_argument("--raw", type=Path, required=True, help="runs, appended to")
    parser.add_argument("--grid", choices=sorted(GRIDS), default="full")
    parser.add_argument("--repeats", type=int, default=3, help="repeats to add; 0: figures only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--force", action="store_true", help="replace a larger measurement")
    chosen = parser.parse_args(words)
    arguments = sys.argv[1:] if words is None else list(words)
    model = chosen.model or str(ensure_smollm2())
    grid = GRIDS[chosen.grid]
    first = next_repeat(chosen.raw)
    chosen.raw.parent.mkdir(parents=True, exist_ok=True)
    for repeat in range(chosen.repeats):
        serve_repeat(grid, model, first + repeat * grid.rounds, chosen.seed, chosen.raw)
    runs = read_runs(chosen.raw, len(grid.strategies))
    figures = figures_of(grid, runs, "" if grid.by_degree else f"_{chosen.grid}")
    document = {
        "topic": "cow",
        **provenance.figures_head(MODULE, arguments),
        "settings": {
            "model": provenance.model_facts(model)["name"],
            "dtype": "float32",
            "page_size": PAGE_SIZE,
            "grid": chosen.grid,
            "pool": grid.pool,
            "tail_tokens": TAIL,
            "answer_tokens": ANSWER,
            "cells": [one.name for one in grid.cells],
            "seed": chosen.seed,
            "patch_series": provenance.patch_series_hash(),
        },
        "repeats": repeats_of(grid, runs),
        "figures": figures,
    }
    write_figures(chosen.out, document, chosen.force)
    for name in sorted(figures):
        if name.startswith(("auto_vs", "retained", "neighbour")):
            print(f"{name:60} {figures[name]['value']:.4g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
