"""Run a grid: every server is started once per repeat and serves all cells that it can.

Arms that differ only in what a request may choose (shared pages, publishing, policy settings) use
one server; page size, reclaiming at all, and how copies are made need servers of their own. Before
every cell the prefix cache is emptied. Inside a repeat, servers come in rotating order, and so do
the arms that share one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import provenance
from .arms import PRUNING_SETTINGS, Arm
from .cell import FLUSH_TRIES, flush_cache, measure, warm_up
from .cells import CellStore
from .config import EvalConfig
from .estimate import STARTUP_S, STOP_S, Estimate, estimate
from .grid import Study
from .progress import Progress
from .run import Prepared, arm_environment, engine_args, prepare
from .server import ServerProcess, free_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One arm of one study in one repeat, not measured yet."""

    study: Study
    prepared: Prepared
    arm: Arm
    repeat: int


def prepare_all(studies: Sequence[Study], tokenizer_model: str | None = None) -> list[Prepared]:
    """Requests of every study. Arguments and errors: see `run.prepare`."""
    return [prepare(study.config, tokenizer_model) for study in studies]


def server_command(config: EvalConfig, arm: Arm, port: int) -> list[str]:
    """The command of a server for this arm and all that can share it.

    What a request may set is left at its default, whatever the study says; the policy is not, for
    a server may have to prepare for it.
    """
    fields = EvalConfig.__dataclass_fields__
    neutral: dict[str, Any] = {
        name: fields[name].default for name in PRUNING_SETTINGS if name not in ("policy", "seed")
    }
    own = replace(config, page_size=arm.page_size or config.page_size, **neutral)
    return arm.command(engine_args(own, port), own, shares=True)


def open_cells(
    studies: Sequence[Study], prepared: Sequence[Prepared], store: CellStore
) -> list[Cell]:
    """Every cell that the store lacks, repeat by repeat."""
    repeats = max((study.config.repeats for study in studies), default=0)
    return [
        Cell(study=study, prepared=ready, arm=arm, repeat=repeat)
        for repeat in range(repeats)
        for study, ready in zip(studies, prepared, strict=True)
        if repeat < study.config.repeats
        for arm in ready.arms
        if not store.has(study.name, arm.name, repeat)
    ]


def by_server(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in the order they are measured, those of one server start together."""
    groups: dict[tuple[int, tuple[str, ...]], list[Cell]] = {}
    for cell in cells:
        key = (cell.repeat, tuple(server_command(cell.prepared.config, cell.arm, 0)))
        groups.setdefault(key, []).append(cell)
    ordered: list[list[Cell]] = []
    for repeat in sorted({repeat for repeat, _ in groups}):
        mine = [group for (number, _), group in groups.items() if number == repeat]
        shift = repeat % len(mine)
        ordered += [_rotate_arms(group, repeat) for group in (*mine[shift:], *mine[:shift])]
    return ordered


def _rotate_arms(group: Sequence[Cell], repeat: int) -> list[Cell]:
    """Study by study, the arms of each rotated."""
    studies: dict[str, list[Cell]] = {}
    for cell in group:
        studies.setdefault(cell.study.name, []).append(cell)
    rotated: list[Cell] = []
    for cells in studies.values():
        shift = repeat % len(cells)
        rotated += [*cells[shift:], *cells[:shift]]
    return rotated


def estimate_cells(groups: Sequence[Sequence[Cell]]) -> Estimate:
    """Time for the given cells: server starts, and the requests of each cell."""
    if not groups:
        return Estimate(start_s=0.0, run_s=0.0, servers=0)
    device = groups[0][0].prepared.config.device
    seconds: dict[str, float] = {}
    rates = None
    total = 0.0
    for cell in (cell for group in groups for cell in group):
        if cell.study.name not in seconds:
            ready = cell.prepared
            weights = int(ready.model.get("weight_bytes", 0))
            if rates is None and device == "cpu":
                from .estimate import cpu_rates

                rates = cpu_rates()
            seconds[cell.study.name] = estimate(
                ready.config, ready.workload, device, weights, rates
            ).run_s
        total += seconds[cell.study.name]
    return Estimate(
        start_s=STARTUP_S[device] + STOP_S,
        run_s=total / len(groups),
        servers=len(groups),
        complete=device == "cpu",
    )


def run_grid(
    groups: Sequence[Sequence[Cell]], store: CellStore, command: str, progress: Progress
) -> None:
    """Measure every cell and save each as it ends.

    Raises:
        ServerError: a server did not start, or ended while it was used. Cells finished before
            are kept, also when interrupted.
    """
    for number, group in enumerate(groups, start=1):
        _run_group(number, group, store, command, progress)


def _run_group(
    number: int, group: Sequence[Cell], store: CellStore, command: str, progress: Progress
) -> None:
    first = group[0]
    config = first.prepared.config
    port = config.port or free_port()
    words = server_command(config, first.arm, port)
    environment = arm_environment(config, first.arm)
    log = store.folder / f"server-{first.repeat + 1}-{number}-{time.time_ns() // 10**6}.log"
    server = ServerProcess(words, port, log, environment, config.startup_timeout)
    arms = ", ".join(dict.fromkeys(cell.arm.name for cell in group))
    progress.say(f"repeat {first.repeat + 1}: starting the server of {arms}")
    # Taken now, for a checkout may move on while a server runs that has loaded what it was.
    origin = {"command": command, **provenance.origin(config.device)}
    with server:
        warm_up(server, first.prepared.workload, config)
        for cell in group:
            label = f"repeat {cell.repeat + 1} {cell.study.name} {cell.arm.name}"
            progress.stage(label)
            flush_cache(server.base_url, FLUSH_TRIES)
            run = _run_cell(server, words, cell, store.folder, origin, progress)
            store.write(cell.study.name, run)
            summary = run["summary"]
            failed = f", {summary['failed']} FAILED" if summary["failed"] else ""
            progress.run_finished(
                f"{label}: {summary['output_tokens_per_s']:.1f} tokens/s, "
                f"served {summary['duration_s']:.0f} s{failed}"
            )


def _run_cell(
    server: ServerProcess,
    words: Sequence[str],
    cell: Cell,
    folder: Path,
    origin: Mapping[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    ready, arm = cell.prepared, cell.arm
    at, load = datetime.now(UTC).isoformat(timespec="seconds"), os.getloadavg()[0]
    found = measure(
        server,
        ready.workload,
        arm,
        ready.config,
        ready.tokenizer,
        options=arm.options(ready.config),
        look=any(other.prunes for other in ready.arms),
        kv_bytes=int(ready.model.get("kv_bytes_per_token", 0)),
        folder=folder,
        on_request=progress.request,
    )
    return {
        "arm": arm.name,
        "repeat": cell.repeat,
        "at": at,
        "origin": {**origin, "started": at},
        "command": provenance.portable_command(words),
        "startup_s": server.startup_s,
        "load_average_before": load,
        **found,
    }
