"""`vtoken-sglang serve` and `check`: SGLang's own launcher, with early one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from vtoken_sglang.engine.plugin.installation import require_version
from vtoken_sglang.errors import ConfigError, HookError, VTokenError
from vtoken_sglang.option_flags import split_arguments
from vtoken_sglang.option_values import flag_label
from vtoken_sglang.options import from_environment, to_environment
from vtoken_sglang.policy.names import check_installed


def serve(argv: list[str]) -> int:
    """Start SGLang's HTTP server and block until it ends. Returns the exit status.

    Raises:
        ConfigError, HookError, UnsupportedModeError: before the model is loaded.
    """
    require_version()
    if "--config" not in argv:
        config, argv = split_arguments(argv)
        if config is not None:
            check_installed(config.policy, flag_label("policy"))
            to_environment(config)
        _check_early(argv)
    # Otherwise the file may hold any of it: SGLang merges it, and the command line wins.
    _default_threads()
    # SGLang warns about kernels that this machine lacks, before it says anything of use.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"sglang\.")
    import yaml
    from sglang.srt.utils import kill_process_tree

    _load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    try:
        with _short_usage(argv):
            server_args = prepare_server_args(argv)
        _check_model(server_args.model_path)
        _check_port(server_args.host, server_args.port)
        run_server(server_args)
    except VTokenError:
        raise
    except (
        ValueError, OSError, RuntimeError, AssertionError, ImportError, yaml.YAMLError
    ) as error:  # fmt: skip
        # One line for the user; SGLang's own log above it has the traceback where there is one.
        text = str(error).strip() or type(error).__name__
        first_line = text.splitlines()[0]
        print(f"vtoken-sglang serve: {type(error).__name__}: {first_line}", file=sys.stderr)
        return 1
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


@contextlib.contextmanager
def _short_usage(argv: list[str]) -> Iterator[None]:
    """Cut a parser's complaint to its last line: its usage is 400 lines of another program's."""
    if any(word in ("-h", "--help") for word in argv):
        yield
        return
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            yield
    except SystemExit:
        *before, last = shown.getvalue().strip().splitlines() or [""]
        problem = last.partition("error: ")[2] or "\n".join([*before, last])
        hint = "vtoken-sglang serve --help lists the options"
        print(f"vtoken-sglang serve: {problem} ({hint})", file=sys.stderr)
        raise
    else:
        print(shown.getvalue(), end="", file=sys.stderr)


def check(argv: list[str]) -> int:
    """Verify version, upstream files and hooks in this process, and print each hook's target and
    reason, and which call-outs of a patched SGLang are used in place of a hook."""
    if argv:
        raise ConfigError("check", "takes no arguments", argv[0])
    from vtoken_sglang.options import VTokenConfig

    require_version()
    if from_environment() is None:
        to_environment(VTokenConfig())
    _load_plugins()
    from vtoken_sglang.engine.plugin.hook import used_call_out
    from vtoken_sglang.engine.plugin.registration import registered_hooks

    call_outs = 0
    for hook in registered_hooks():
        if (call_out := used_call_out(hook)) is not None:
            call_outs += 1
            print(f"ok  {hook.name:<28} call-out {call_out.path}\n      {hook.why}")
        else:
            print(f"ok  {hook.name:<28} {hook.kind:<8} {hook.target}\n      {hook.why}")
    print(f"{len(registered_hooks()) - call_outs} hooks and {call_outs} call-outs in place")
    return 0


def _load_plugins() -> None:
    """Load SGLang's plugins and insist that ours is among them and verified."""
    from sglang.srt.plugins import load_plugins

    from vtoken_sglang.engine.plugin.installation import is_verified

    load_plugins()
    if not is_verified():
        raise HookError(
            "plugin",
            "SGLang did not load the vtoken plugin"
            + (" (SGLANG_PLUGINS excludes it)" if os.environ.get("SGLANG_PLUGINS") else ""),
            "add 'vtoken' to SGLANG_PLUGINS, or reinstall this package",
        )


def _default_threads() -> None:
    """On a CPU machine, default to one OpenMP thread per process.

    SGLang's processes each start a full pool otherwise; the pools fight and decoding becomes
    many times slower. A value set by the user stands.
    """
    from vtoken_sglang.engine.plugin.cpu_platform import activate

    if activate() is not None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def _check_early(argv: list[str]) -> None:
    """Refuse a missing model and a port in use before SGLang is imported, which takes a while."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    try:
        known, _ = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return  # SGLang's own parser says what is wrong
    if known.model_path is not None:
        _check_model(known.model_path)
        _check_port(known.host, known.port)


def _check_model(model_path: str) -> None:
    """Refuse a path that cannot be a model; a hub name is left to SGLang."""
    path = Path(model_path).expanduser()
    looks_local = path.is_absolute() or model_path.startswith((".", "~")) or path.exists()
    if looks_local and not (path.is_file() or (path / "config.json").is_file()):
        rule = "must be a folder with a config.json" if path.is_dir() else "must exist"
        raise ConfigError("--model-path", rule, model_path)


def _check_port(host: str, port: int) -> None:
    """Refuse a port in use now, not after the model has loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                "--port", f"must be free on {host} ({error.strerror})", port
            ) from error
