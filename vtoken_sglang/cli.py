"""`vtoken-sglang` command line: serve, check, policies, model, eval.

Each sub-command imports what it needs when it runs; in particular nothing here imports SGLang
until `serve` or `check` is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from vtoken_sglang import SUPPORTED_SGLANG_VERSION, __version__
from vtoken_sglang.errors import VTokenError, shown

EVAL_EXTRA = ("accelerate", "aiohttp", "datasets", "jinja2", "matplotlib", "tqdm")
"""Modules of the extra `eval`, which a plain installation may lack."""


def _serve(argv: Sequence[str]) -> int:
    """start SGLang's server with --vtoken-* options (all other flags are SGLang's own)"""
    from vtoken_sglang.engine.serve import serve

    return serve(list(argv))


def _check(argv: Sequence[str]) -> int:
    """verify that version, files and hooks fit this installation; start nothing"""
    from vtoken_sglang.engine.serve import check

    return check(list(argv))


def _policies(_argv: Sequence[str]) -> int:
    """list eviction policies with their parameters"""
    from vtoken_sglang.policy.registry import describe_policies

    print(describe_policies())
    return 0


def _model(argv: Sequence[str]) -> int:
    """fetch and convert the small default model; print its folder"""
    return _of_the_extra("models", argv)


def _eval(argv: Sequence[str]) -> int:
    """run the evaluation against real served engines; render reports"""
    return _of_the_extra("main", argv)


def _of_the_extra(module: str, argv: Sequence[str]) -> int:
    try:
        return int(import_module(f"vtoken_sglang_eval.{module}").main(list(argv)) or 0)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EVAL_EXTRA:
            raise
        need = f"needs the eval extra: pip install 'vtoken-sglang[eval]' ({error})"
        print(f"vtoken-sglang: {need}", file=sys.stderr)
        return 2


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "check": _check,
    "policies": _policies,
    "model": _model,
    "eval": _eval,
}


def usage() -> str:
    """The help text."""
    lines = ["usage: vtoken-sglang COMMAND [options]", ""]
    lines += [f"  {name:<10} {command.__doc__}" for name, command in COMMANDS.items()]
    lines += ["", f"version {__version__}, for sglang {SUPPORTED_SGLANG_VERSION}"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; return its exit status. 2 for a usage or configuration error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"vtoken-sglang {__version__} (sglang {SUPPORTED_SGLANG_VERSION})")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        known = ", ".join(COMMANDS)
        name = shown(arguments[0])
        print(f"vtoken-sglang: unknown command {name}; one of {known}", file=sys.stderr)
        return 2
    try:
        return command(arguments[1:])
    except VTokenError as error:
        print(f"vtoken-sglang {arguments[0]}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
