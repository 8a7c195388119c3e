"""`vtoken-sglang eval full`: measure what a grid still lacks, then write table, report, figures."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vtoken_sglang_eval.models import ensure_smollm2

from . import provenance
from .cells import CellStore
from .config import with_default_model
from .document import outline
from .errors import ConfigError
from .estimate import minutes
from .figures import check_target
from .full import Cell, by_server, estimate_cells, open_cells, prepare_all, run_grid, server_command
from .grid import Study, read_grid
from .progress import Progress
from .run import Prepared
from .samples_mode import with_samples


def run_full(options: argparse.Namespace, flags: Mapping[str, Any], command: str) -> int:
    """Measure and report; the exit status, 1 when some request failed.

    Raises:
        ConfigError, DatasetError: the grid cannot be measured.
        ResultsError: the folder holds another grid.
        FiguresError: `--figures` names no file for this table.
        ServerError: a server failed; finished cells are kept and the next call goes on.
    """
    if options.figures:
        check_target(options.figures, "eval")
    studies = tuple(
        replace(study, config=with_default_model(study.config))
        for study in read_grid(options.config, flags)
    )
    tokenizer_model = None
    if options.samples:
        if not options.dry_run:
            raise ConfigError("samples", "needs --dry-run: samples are not for measuring", True)
        studies = tuple(map(with_samples, studies))
        tokenizer_model = str(ensure_smollm2())
    prepared = prepare_all(studies, tokenizer_model)
    store = CellStore(options.out or Path("reports") / Path(options.config).stem)
    cells = open_cells(studies, prepared, store)
    total = sum(len(ready.arms) * ready.config.repeats for ready in prepared)
    if options.only:
        cells = _only(cells, studies, options.only)
    groups = by_server(cells)
    expected = estimate_cells(groups)
    for study, ready in zip(studies, prepared, strict=True):
        print(study_line(study, ready))
    print(f"{total} cells, {len(cells)} of them to be measured now. {expected.text()}", flush=True)
    if options.dry_run:
        if not options.samples:
            store.check(_entries(studies, prepared, {}))
        for line in server_lines(groups):
            print(line)
        return 0
    origin = {"command": command, **provenance.origin(prepared[0].config.device), "started": ""}
    store.open(_entries(studies, prepared, origin))
    print(f"Cells and server logs: {store.folder}; a second call goes on there", flush=True)
    requests = sum(cell.prepared.workload.requests for cell in cells)
    progress = Progress(len(cells), max(1, requests // max(1, len(cells))))
    try:
        run_grid(groups, store, command, progress)
    finally:
        progress.close()
    return _finish(options, store, command)


def _only(cells: Sequence[Cell], studies: Sequence[Study], names: Sequence[str]) -> list[Cell]:
    known = {study.config.workload for study in studies}
    for name in names:
        if name not in known:
            raise ConfigError("only", f"must be among {', '.join(sorted(known))}", name)
    return [cell for cell in cells if cell.study.config.workload in names]


def _entries(
    studies: Sequence[Study], prepared: Sequence[Prepared], origin: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What the folder keeps of every study."""
    entries = []
    for study, ready in zip(studies, prepared, strict=True):
        document = outline(
            ready.config, ready.arms, ready.dataset, ready.workload, ready.model, origin
        )
        entry = {"name": study.name, "setting": dict(study.setting), "outline": document}
        entries.append(entry)
    return entries


def study_line(study: Study, ready: Prepared) -> str:
    """One line on a study of the grid."""
    workload = ready.workload
    return (
        f"{study.name}: {workload.requests} requests, longest {workload.longest()} tokens, "
        f"{workload.output_tokens()} to generate; {len(ready.arms)} arms, "
        f"{ready.config.repeats} repeats"
    )


def server_lines(groups: Sequence[Sequence[Cell]]) -> list[str]:
    """Every different server command, with the cells it serves in a repeat."""
    lines: dict[str, str] = {}
    for group in groups:
        words = server_command(group[0].prepared.config, group[0].arm, 0)
        arms = ", ".join(dict.fromkeys(cell.arm.name for cell in group))
        lines.setdefault(provenance.portable_command(words), f"{arms} ({len(group)} cells)")
    return [f"server of {arms}: {command}" for command, arms in lines.items()]


def _free_report(folder: Path) -> Path:
    """`report.html`, or the next of `report-2.html`, ... that does not exist: an earlier call may
    have written one of a part of the grid."""
    names = itertools.chain(["report.html"], (f"report-{n}.html" for n in itertools.count(2)))
    return next(path for path in (folder / name for name in names) if not path.exists())


def _finish(options: argparse.Namespace, store: CellStore, command: str) -> int:
    from .findings import findings
    from .overview import overview_text
    from .report import write_report
    from .rows import eval_document, rows_of, write_eval

    results = store.results()
    if not results:
        return 0
    rows = rows_of(results)
    print(f"\n{overview_text(rows)}\n")
    for question, answer in findings(rows):
        print("\n  ".join([question, *answer]), end="\n\n")
    took = sum(result["duration_s"] for result in results)
    print(f"Requests took {minutes(took)} in all calls together.")
    print(f"Report: {write_report(results, _free_report(store.folder))}")
    if options.figures:
        write_eval(options.figures, eval_document(results, command), options.force)
        print(f"Figures: {options.figures}")
    failed = sum(run["summary"]["failed"] for result in results for run in result["runs"])
    return 1 if failed else 0
