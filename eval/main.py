"""`vtoken-sglang eval`: compare, study, report."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from vtoken_sglang.errors import VTokenError

from . import provenance
from .errors import ConfigError
from .options import Options, add_flags, given_flags, make_options
from .studies import read_studies, shipped

if TYPE_CHECKING:
    from .runner import Plan

PROGRAM = "vtoken-sglang eval"
REPORTS = Path("reports")


def parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    top = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="compare|study|report")
    compare = commands.add_parser(
        "compare", help="your workload under policies, shares and ways with shared pages"
    )
    add_flags(compare)
    study = commands.add_parser("study", help="the comparisons of a TOML file")
    study.add_argument("file", help=f"a TOML file, or one that ships: {', '.join(shipped())}")
    study.add_argument(
        "--only", type=_names, default=(), metavar="A,B", help="these studies of the file"
    )
    add_flags(study)
    for command in (compare, study):
        command.add_argument(
            "--out", type=Path, metavar="DIR",
            help="where the runs are kept; named again, what is missing there is measured",
        )  # fmt: skip
        command.add_argument(
            "--dry-run", action="store_true", help="show what would be done and start nothing"
        )
    report = commands.add_parser("report", help="one HTML page of measured studies")
    report.add_argument("results", nargs="+", type=Path, metavar="DIR|FILE")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: beside the first")
    report.add_argument("--svg", type=Path, metavar="DIR", help="also write the plots as SVG files")
    report.add_argument(
        "--figures", metavar="STUDIES", help="write the figures that this TOML file declares"
    )
    report.add_argument("--into", type=Path, metavar="FILE", help="the figures file of --figures")
    report.add_argument(
        "--force", action="store_true", help="let --figures replace a larger measurement"
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Returns:
        0; 1 when some request failed; 2 for a wrong option, missing data or a failing server;
        130 when interrupted: what was measured by then is kept.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    # Libraries warn about themselves while they load; nobody here can act on it.
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    previous = signal.signal(signal.SIGTERM, _interrupt)  # so that servers are ended then too
    commands = {"report": _report, "study": _study, "compare": _compare}
    try:
        return commands[options.command](options, words)
    except VTokenError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        needed = "needs the extra eval: pip install 'vtoken-sglang[eval]'"
        print(f"{PROGRAM}: {needed} ({error.name} is missing)", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; no server is left running", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _compare(chosen: argparse.Namespace, words: Sequence[str]) -> int:
    return _measure({"compare": make_options(given_flags(chosen))}, "compare", chosen, words)


def _study(chosen: argparse.Namespace, words: Sequence[str]) -> int:
    studies = read_studies(chosen.file, given_flags(chosen))
    for name in chosen.only:
        if name not in studies:
            raise ConfigError("--only", f"must be among {', '.join(studies)}", name)
    wanted = {n: one for n, one in studies.items() if n in chosen.only or not chosen.only}
    return _measure(wanted, Path(chosen.file).stem, chosen, words)


def _measure(
    studies: Mapping[str, Options], name: str, chosen: argparse.Namespace, words: Sequence[str]
) -> int:
    """Measure every study into a folder of its own, and write one report about all of them, also
    about what there is of an interrupted one."""
    from .report import check_extras, write_report
    from .report import read_studies as read_measured
    from .runner import make_plan, run_study
    from .store import RunStore, new_folder

    if not chosen.dry_run:
        check_extras()
    folder = chosen.out or new_folder(REPORTS, name)
    command = f"{PROGRAM} {provenance.portable_command(words)}"
    failed = 0
    try:
        for number, (study, options) in enumerate(studies.items(), start=1):
            plan = make_plan(study, options)
            _say(f"study {study} ({number} of {len(studies)}): {_requests(plan)}")
            if chosen.dry_run:
                _say(commands_text(plan))
                continue
            place = folder / study if len(studies) > 1 else folder
            failed += run_study(plan, RunStore(place, plan.head(command)), _say)
    finally:
        if not chosen.dry_run and list(folder.glob("**/runs.jsonl")):
            try:
                measured = read_measured([folder])
            except VTokenError:
                measured = []  # nothing was measured; why is told by the first error
            if measured:
                path = write_report(measured, folder / "report.html")
                _say("\n".join(verdicts(measured)))
                _say(f"Report: {path}")
    if failed:
        print(f"{failed} requests failed; see {folder}", file=sys.stderr)
    return 1 if failed else 0


def _requests(plan: Plan) -> str:
    workload = plan.workload
    loads = ", ".join(str(load) if load else "all" for load in plan.loads)
    facts = "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in workload.facts.items())
    return (
        f"{workload.requests} requests in {len(workload.sessions)} sessions of {workload.name}, "
        f"{'at their own times' if workload.timed else f'{loads} in flight'}, "
        f"{workload.output_tokens()} tokens to generate; {facts}\n"
        f"{len(plan.arms)} arms, {plan.options.repeats} repeats"
    )


def commands_text(plan: Plan) -> str:
    """Every arm, under the server that serves it."""
    from .targets import shown_command

    lines = []
    for group in plan.groups:
        where = group.key if plan.running else shown_command(plan.options, group.key)
        lines += [f"server: {where}", *(f"  {arm.name}: {arm.request}" for arm in group.arms)]
    return "\n".join(lines)


def verdicts(studies: Sequence[Any]) -> list[str]:
    """A line per study on its best cell, and one on what it costs in answers."""
    from .table import long_table, runs_table, summary
    from .verdict import best_of, sharing_of

    runs = runs_table(studies)
    cells = summary(long_table(runs))
    lines = []
    for head, _ in studies:
        best = best_of(cells, head["name"])
        if best is None:
            continue
        held = f", {best.memory} x its memory per request" if best.memory else ""
        late = f", {best.latency} x its p95" if best.latency else ""
        lines.append(
            f"{head['name']}: {best.arm} serves {best.throughput} x native's tokens/s{held}{late}"
        )
        for one in sharing_of(runs, head["name"]):
            if one.arm == best.arm:
                lines.append(f"  throughput against {one.other}: {one.throughput} x")
        if best.quality is None:
            lines.append("  answers: not checked (--quality)")
        else:
            lines.append(
                f"  answers: {best.quality:.0%} right, {best.native_quality or 0:.0%} with full "
                "attention"
            )
    return lines


def _report(chosen: argparse.Namespace, words: Sequence[str]) -> int:
    from .report import pictures, read_studies, write_report

    studies = read_studies(chosen.results)
    first = chosen.results[0]
    folder = first if first.is_dir() else first.parent
    _say(f"Report: {write_report(studies, chosen.out or folder / 'report.html')}")
    if chosen.svg:
        for path in pictures(studies, chosen.svg):
            _say(str(path))
    if chosen.figures:
        from .study_figures import write_declared

        if not chosen.into:
            raise ConfigError("--into", "must name the figures file", None)
        write_declared(chosen.figures, studies, chosen.into, chosen.force)
        _say(f"Figures: {chosen.into}")
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _say(text: str) -> None:
    print(text, flush=True)
