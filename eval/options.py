"""The command-line parser of `vtoken-sglang eval`, apart from what its commands do."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from .arms import ARMS
from .config import EvalConfig, make_config, read_config_file
from .workload import workload_builders

DESCRIPTION = "Serve real engines one after the other and measure the same requests on each."
COMMANDS = "quick|run|full|report"
COUNTS = (
    ("repeats", "how often every arm is served"),
    ("page-size", "tokens per KV page"),
    ("pool", "KV pool in tokens"),
    ("conversations", "sessions"),
    ("turns", "user turns per session"),
    ("concurrency", "sessions in flight"),
    ("sharing", "sessions that share a prefix, 0 for all of them"),
    ("system-tokens", "length of the shared prefix"),
    ("user-tokens", "longest user turn kept"),
    ("out-tokens", "mean length of an answer"),
    ("seed", "choice and order of conversations"),
    ("port", "server port, 0 for any free one"),
    ("sink", "first tokens that pruning arms never evict"),
    ("recent", "last tokens that pruning arms never evict"),
    ("interval", "new tokens of a request between two evictions"),
)
NUMBERS = (
    ("keep", "SHARE", "share of the tokens that pruning arms keep"),
    ("time-scale", "FACTOR", "stretches the times of a replayed trace"),
    ("length-scale", "FACTOR", "stretches the lengths of a replayed trace"),
    ("slo-ttft", "S", "longest time to the first token of a good request"),
    ("slo-tpot", "S", "longest mean time per further token of a good request"),
    ("startup-timeout", "S", "seconds a server may take to start"),
    ("sample-interval", "S", "seconds between two looks at a server"),
)


def parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    top = argparse.ArgumentParser(prog="vtoken-sglang eval", description=DESCRIPTION)
    commands = top.add_subparsers(dest="command", required=True, metavar=COMMANDS)
    quick = commands.add_parser("quick", help="small comparison, under ten minutes on two cores")
    run = commands.add_parser("run", help="one comparison by a config file and flags")
    run.add_argument(
        "--config", metavar="FILE", help="TOML file or a shipped name (serve); flags win"
    )
    full = commands.add_parser("full", help="a grid of comparisons; goes on where it stopped")
    full.add_argument(
        "--config", metavar="FILE", default="full", help="grid as TOML, or a shipped name"
    )
    full.add_argument(
        "--only", type=_names, metavar="A,B", help="measure only these workloads of the grid now"
    )
    full.add_argument(
        "--samples", action="store_true",
        help="with --dry-run: small samples in place of model and data that are not here",
    )  # fmt: skip
    for command in (quick, run, full):
        _add_run_flags(command)
        out = "reports/NAME of the grid" if command is full else "reports"
        command.add_argument("--out", type=Path, metavar="DIR", help=f"default: {out}")
    report = commands.add_parser("report", help="render results as one HTML page")
    report.add_argument(
        "results", nargs="+", type=Path, metavar="RESULT",
        help="run folder, folder of a grid, result file, or figures file",
    )  # fmt: skip
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="default: beside the first result; with --doc none",
    )
    report.add_argument(
        "--figures", type=Path, metavar="FILE",
        help="also write the table of a grid's folder, as far as it is measured, into this file",
    )  # fmt: skip
    report.add_argument(
        "--force", action="store_true", help="let --figures replace a larger measurement"
    )
    report.add_argument(
        "--doc", type=Path, metavar="FILE",
        help="write the tables of the figures files between the marks of this text",
    )  # fmt: skip
    report.add_argument("--png", type=Path, metavar="DIR", help="also write the plots as PNG files")
    return top


def _add_run_flags(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--model", help="folder or name that SGLang loads (default: SmolLM2-135M-Instruct)")
    add("--dataset", help="file with conversations, documents or a trace, or hf:NAME")
    add("--arms", type=_names, metavar="A,B", help=f"among {','.join(ARMS)}")
    if not command.prog.endswith("full"):
        add("--workload", metavar="NAME", help=f"among {','.join(workload_builders())}")
    add("--policy", metavar="NAME", help="what pruning arms evict; see vtoken-sglang policies")
    for name, text in COUNTS:
        add(f"--{name}", type=int, metavar="N", help=text)
    for name, unit, text in NUMBERS:
        add(f"--{name}", type=float, metavar=unit, help=text)
    add("--device", choices=("auto", "cpu", "cuda"), help="default: auto")
    add("--dtype", help="default: float32 on a CPU, bfloat16 elsewhere")
    add("--server-args", type=_words, metavar="'WORDS'", help="extra engine flags for every arm")
    add("--figures", type=Path, metavar="FILE", help="also write the figures into this JSON file")
    add("--force", action="store_true", help="let --figures replace a larger measurement")
    add("--dry-run", action="store_true", help="show what would be done and start nothing")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _words(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def flags_of(options: argparse.Namespace) -> dict[str, object]:
    """The settings given as flags; None for one that was not."""
    names = EvalConfig.__dataclass_fields__
    return {key: value for key, value in vars(options).items() if key in names}


def config_of(options: argparse.Namespace) -> EvalConfig:
    """The configuration that the options of `quick` or `run` ask for.

    Raises:
        ConfigError: an invalid value, by field, rule and value.
    """
    path = getattr(options, "config", None)
    file_settings = read_config_file(path) if path else {}
    return make_config(options.command, file_settings, flags_of(options))
