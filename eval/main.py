"""`vtoken-sglang eval`: quick, run, full, report."""

from __future__ import annotations

import argparse
import logging
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from vtoken_sglang.errors import VTokenError

from . import provenance
from .config import with_default_model
from .options import config_of, flags_of, parser

__all__ = ["config_of", "main", "parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Returns:
        0; 1 when some request failed; 2 for a wrong option, missing data or a failing server;
        130 when interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    # Libraries warn about themselves while they load; nobody here can act on it.
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it tells when it caches fonts
    previous = signal.signal(signal.SIGTERM, _interrupt)  # so that servers are ended then too
    commands = {"report": _report, "full": _full}
    try:
        return commands.get(options.command, _run)(options, words)
    except VTokenError as error:
        print(f"vtoken-sglang eval: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vtoken-sglang eval: interrupted; no server is left running", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(options: argparse.Namespace, words: Sequence[str]) -> int:
    from .estimate import estimate, minutes
    from .figures import check_target
    from .progress import Progress
    from .report import write_report
    from .results import new_run_folder
    from .run import evaluate, prepare
    from .serve_figures import serve_figures
    from .table import result_table

    if options.figures:
        check_target(options.figures, "serve")
    prepared = prepare(with_default_model(config_of(options)))
    expected = estimate(
        prepared.config,
        prepared.workload,
        prepared.config.device,
        int(prepared.model.get("weight_bytes", 0)),
    )
    print(plan_text(prepared), expected.text(), sep="\n", flush=True)
    if options.dry_run:
        return 0
    folder = new_run_folder(options.out or Path("reports"), prepared.config.preset)
    print(f"Results and server logs: {folder}", flush=True)
    progress = Progress(expected.servers, prepared.workload.requests)
    try:
        command = "vtoken-sglang eval " + provenance.portable_command(words)
        result = evaluate(prepared, folder, command, progress)
    finally:
        progress.close()
    print(f"\n{result_table(result)}\n")
    print(f"Took {minutes(result['duration_s'])}; estimated {minutes(expected.total_s)}.")
    print(f"Report: {write_report([result], folder / 'report.html')}")
    failed = sum(run["summary"]["failed"] for run in result["runs"])
    if failed:
        print(f"{failed} requests failed; see result.json and the logs", file=sys.stderr)
    if options.figures:
        from .figures import write_figures

        write_figures(options.figures, serve_figures(result), options.force)
        print(f"Figures: {options.figures}")
    return 1 if failed else 0


def _full(options: argparse.Namespace, words: Sequence[str]) -> int:
    from .full_command import run_full

    command = "vtoken-sglang eval " + provenance.portable_command(words)
    return run_full(options, flags_of(options), command)


def plan_text(prepared: Any) -> str:
    """What is about to be measured, with the command of every arm's server."""
    from .run import arm_command

    config = prepared.config
    lines = [workload_line(prepared), data_line(prepared)]
    for arm in prepared.arms:
        words = provenance.portable(arm_command(config, arm, config.port))
        lines.append(f"arm {arm.name}: {shlex.join(words)}")
    return "\n".join(lines)


def workload_line(prepared: Any) -> str:
    """One line on the requests."""
    config, workload = prepared.config, prepared.workload
    turns = max(session.turns for session in workload.sessions)
    facts = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in workload.facts.items())
    return (
        f"{workload.name}: {workload.requests} requests in {len(workload.sessions)} sessions of "
        f"{turns} turns, {config.concurrency} in flight, {workload.output_tokens()} tokens "
        f"to generate; {facts}"
    )


def data_line(prepared: Any) -> str:
    """One line on where the text comes from, and on the pool."""
    config, dataset = prepared.config, prepared.dataset
    kinds = (
        (len(dataset.conversations), "conversations"),
        (len(dataset.documents), "documents"),
        (len(dataset.trace), "requests of a trace"),
    )
    held = "".join(f", {count} {kind}" for count, kind in kinds if count)
    if dataset.dropped_chars:
        held += f", cut-off tail of {dataset.dropped_chars} characters"
    return (
        f"data: {dataset.name}{held}; pool {config.pool} tokens, page size {config.page_size}, "
        f"{config.device}, {config.dtype}"
    )


def _report(options: argparse.Namespace, _words: Sequence[str]) -> int:
    from .report import make_folder, write_pngs, write_report
    from .report_inputs import read_inputs

    results, figures = read_inputs(options.results)
    if options.png is not None:
        make_folder(options.png)
    first = options.results[0]
    folder = first if first.is_dir() else first.parent
    if options.out is not None or options.doc is None:
        path = write_report(results, options.out or folder / "report.html", figures)
        print(f"Report: {path}")
    if options.figures is not None:
        from .rows import eval_document, write_eval

        studies = [result for result in results if "study" in result]
        command = str(studies[-1]["command"]) if studies else ""
        figures.append(eval_document(studies, command))
        write_eval(options.figures, figures[-1], options.force)
        print(f"Figures: {options.figures}")
    if options.doc is not None:
        from .doc_tables import doc_tables
        from .markdown import fill_file

        parts = [doc_tables(document) for document in figures]
        fill_file(options.doc, {name: text for part in parts for name, text in part.items()})
        print(f"Tables: {options.doc}")
    if options.png is not None:
        print(f"PNG files: {write_pngs(results, figures, options.png)} in {options.png}")
    return 0
