"""`vtoken-sglang eval`: quick, run, report."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from vtoken_sglang.errors import VTokenError

from . import provenance
from .arms import ARMS
from .config import EvalConfig, make_config, read_config_file
from .errors import ConfigError

DESCRIPTION = "Serve real engines one after the other and measure the same requests on each."


def parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    top = argparse.ArgumentParser(prog="vtoken-sglang eval", description=DESCRIPTION)
    commands = top.add_subparsers(dest="command", required=True, metavar="quick|run|report")
    quick = commands.add_parser("quick", help="small comparison, under ten minutes on two cores")
    run = commands.add_parser("run", help="comparison by a config file and flags")
    run.add_argument(
        "--config", metavar="FILE", help="TOML file or a shipped name (serve); flags win"
    )
    for command in (quick, run):
        _add_run_flags(command)
    report = commands.add_parser("report", help="render result files as one HTML page")
    report.add_argument("results", nargs="+", type=Path, metavar="RESULT")
    report.add_argument("--out", type=Path, metavar="FILE", help="default: beside the first result")
    return top


def _add_run_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", help="folder or name that SGLang loads (default: SmolLM2-135M-Instruct)")
    add("--dataset", help="ShareGPT-format JSON file")
    add("--arms", type=_names, metavar="A,B", help=f"among {','.join(ARMS)}")
    for name, text in (
        ("repeats", "how often every arm is served"),
        ("page-size", "tokens per KV page"),
        ("pool", "KV pool in tokens"),
        ("conversations", "sessions"),
        ("turns", "user turns per session"),
        ("concurrency", "sessions in flight"),
        ("system-tokens", "length of the shared system prompt"),
        ("user-tokens", "longest user turn kept"),
        ("out-tokens", "mean length of an answer"),
        ("seed", "choice and order of conversations"),
        ("port", "server port, 0 for any free one"),
    ):
        add(f"--{name}", type=int, metavar="N", help=text)
    add("--device", choices=("auto", "cpu", "cuda"), help="default: auto")
    add("--dtype", help="default: float32 on a CPU, bfloat16 elsewhere")
    add("--server-args", type=_words, metavar="'WORDS'", help="extra engine flags for every arm")
    add("--startup-timeout", type=float, metavar="S", help="seconds a server may take to start")
    add("--out", type=Path, default=Path("reports"), metavar="DIR", help="default: reports")
    add("--figures", type=Path, metavar="FILE", help="also merge the figures into this JSON file")
    add("--force", action="store_true", help="let --figures replace a larger measurement")
    add("--dry-run", action="store_true", help="show what would be done and start nothing")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def config_of(options: argparse.Namespace) -> EvalConfig:
    """The configuration that the options ask for.

    Raises:
        ConfigError: an invalid value, by field, rule and value.
    """
    names = EvalConfig.__dataclass_fields__
    flags = {key: value for key, value in vars(options).items() if key in names}
    path = getattr(options, "config", None)
    file_settings = read_config_file(path) if path else {}
    return make_config(options.command, file_settings, flags)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command.

    Returns:
        0; 1 when some request failed; 2 for a wrong option, missing data or a failing server;
        130 when interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    previous = signal.signal(signal.SIGTERM, _interrupt)  # so that servers are ended then too
    try:
        if options.command == "report":
            return _report(options)
        return _run(options, words)
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
    from .progress import Progress
    from .report import write_report
    from .results import new_run_folder
    from .run import evaluate, prepare
    from .serve_figures import serve_figures
    from .table import result_table

    config = with_default_model(config_of(options))
    prepared = prepare(config)
    expected = estimate(
        prepared.config,
        prepared.workload,
        prepared.config.device,
        int(prepared.model.get("weight_bytes", 0)),
    )
    print(plan_text(prepared), expected.text(), sep="\n", flush=True)
    if options.dry_run:
        return 0
    folder = new_run_folder(options.out, prepared.config.preset)
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
        _write_figures(options, serve_figures(result))
    return 1 if failed else 0


def _write_figures(options: argparse.Namespace, document: dict[str, Any]) -> None:
    from .figures import write_figures

    write_figures(options.figures, document, options.force)
    print(f"Figures: {options.figures}")


def with_default_model(config: EvalConfig) -> EvalConfig:
    """The configuration with a model: the one named, else the small default, fetched if need be.

    Raises:
        ConfigError: the named local folder does not exist.
    """
    import dataclasses

    if not config.model:
        from vtoken_sglang.models import ensure_smollm2

        return dataclasses.replace(config, model=str(ensure_smollm2()))
    looks_local = config.model.startswith((".", "/", "~"))
    folder = Path(config.model).expanduser()
    if looks_local and not folder.is_dir():
        raise ConfigError("model", "must be an existing folder", config.model)
    return dataclasses.replace(config, model=str(folder) if looks_local else config.model)


def plan_text(prepared: Any) -> str:
    """What is about to be measured, with the command of every arm's server."""
    from .run import engine_args

    config, workload, dataset = prepared.config, prepared.workload, prepared.dataset
    repaired = (
        f", cut-off tail of {dataset.dropped_chars} characters" if dataset.dropped_chars else ""
    )
    lines = [
        f"{workload.name}: {workload.requests} requests in {len(workload.sessions)} sessions of "
        f"{config.turns} turns, {config.concurrency} in flight, {workload.output_tokens()} tokens "
        f"to generate; shared system prompt {workload.facts['system_prompt_tokens']} tokens",
        f"data: {dataset.name}, {len(dataset.conversations)} conversations{repaired}",
        f"pool {config.pool} tokens, page size {config.page_size}, {config.device}, {config.dtype}",
    ]
    for arm in prepared.arms:
        words = provenance.portable(arm.command(engine_args(config, config.port)))
        lines.append(f"arm {arm.name}: {shlex.join(words)}")
    return "\n".join(lines)


def _report(options: argparse.Namespace) -> int:
    from .report import write_report
    from .results import read_result

    results = [read_result(path) for path in options.results]
    first = options.results[0]
    folder = first if first.is_dir() else first.parent
    print(f"Report: {write_report(results, options.out or folder / 'report.html')}")
    return 0
