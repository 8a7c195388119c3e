"""`vtoken-sglang serve` and `check`: SGLang's own launcher, with one-line errors."""

from __future__ import annotations

import os
import socket
import sys
import warnings

from vtoken_sglang.engine.plugin.installation import require_version
from vtoken_sglang.errors import ConfigError, HookError, VTokenError
from vtoken_sglang.option_flags import split_arguments
from vtoken_sglang.options import VTokenConfig, from_environment, to_environment


def serve(argv: list[str]) -> int:
    """Start SGLang's HTTP server and block until it ends. Returns the exit status.

    Raises:
        ConfigError, HookError, UnsupportedModeError: before the model is loaded.
    """
    require_version()
    if "--config" not in argv:
        config, argv = split_arguments(argv)
        if config is not None:
            to_environment(config)
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
        server_args = prepare_server_args(argv)
        _require_model(server_args.model_path)
        _require_port(server_args.host, server_args.port)
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


def check(argv: list[str]) -> int:
    """Verify version, upstream files and hooks in this process, and print each hook's target and
    reason, and which call-outs of a patched SGLang are used in place of a hook."""
    if argv:
        raise ConfigError("check", "takes no arguments", argv[0])
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


def _require_model(path: str) -> None:
    """Refuse a folder that is not there: SGLang takes it for a name on the hub."""
    if path.startswith((".", "/")) and not os.path.exists(path):
        raise ConfigError("--model-path", "must exist", path)


def _require_port(host: str, port: int) -> None:
    """Refuse a port in use: SGLang finds out once the model is loaded, and then never ends."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            rule = f"must be free on {host} ({error.strerror})"
            raise ConfigError("--port", rule, port) from error
