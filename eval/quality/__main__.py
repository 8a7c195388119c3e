"""`python -m vtoken_sglang_eval.quality`: one command per measurement, each can be resumed.

A command that runs out of its --minutes ends with exit status 3; the same command goes on. When
everything was measured it merges its figures into --out and draws the plots beside it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vtoken_sglang.errors import VTokenError

from . import commands

UNFINISHED = 3
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace, list[str]], bool], str]] = {
    "perplexity": (commands.perplexity_command, "real text behind a pruned prompt"),
    "questions": (commands.questions_command, "needles, and facts told two turns earlier"),
    "ruler": (commands.ruler_command, "a subset of RULER, made by its own generator"),
    "served": (commands.served_command, "some of the questions on a served engine"),
    "lookups": (commands.lookups_command, "facts in texts of 1k to 4k tokens, of many kinds"),
    "seeds": (commands.seeds_command, "scores of a cached prefix handed on, and not"),
    "kvpress": (commands.kvpress_command, "the same policies in kvpress"),
    "lines": (commands.lines_command, "length of the policies' files"),
    "tables": (commands.tables_command, "fill in the tables of --doc from --out"),
}


def parser() -> argparse.ArgumentParser:
    """The command-line parser."""
    top = argparse.ArgumentParser(prog="python -m vtoken_sglang_eval.quality", description=__doc__)
    subparsers = top.add_subparsers(dest="command", required=True, metavar="|".join(COMMANDS))
    for name, (_, text) in COMMANDS.items():
        command = subparsers.add_parser(name, help=text, description=text)
        add = command.add_argument
        add(
            "--out",
            type=Path,
            required=True,
            metavar="FILE",
            help="figures file, topic policies (quality for lookups)",
        )
        if name in ("lines", "tables"):
            commands.add_options(name, command)
            continue
        add("--work", type=Path, default=Path("reports/quality"), metavar="DIR",
            help="raw rows, to resume from (default: reports/quality)")  # fmt: skip
        add("--minutes", type=float, metavar="M", help="stop after M minutes; run again to go on")
        add("--model", help="local model folder (default: SmolLM2-135M-Instruct)")
        add("--dataset", help="ShareGPT-format JSON file")
        add("--seed", type=int, default=0)
        add("--force", action="store_true", help="replace a larger measurement")
        commands.add_options(name, command)
    return top


def main(words: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if words is None else list(words)
    chosen: Any = parser().parse_args(arguments)
    try:
        done = COMMANDS[chosen.command][0](chosen, arguments)
    except VTokenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not done:
        print("not everything is measured yet: run the same command again", file=sys.stderr)
        return UNFINISHED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
