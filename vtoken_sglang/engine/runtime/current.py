"""The runtime of this process, where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken_sglang.options import VTokenConfig, from_environment

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from vtoken_sglang.engine.runtime.runtime import Runtime

_runtime: Runtime | None = None


def current() -> Runtime | None:
    """The runtime that `start` made; None before that, and where nothing is pruned."""
    return _runtime


def start(scheduler: Scheduler) -> VTokenConfig | None:
    """Verify what SGLang built and make the runtime, if the config prunes. Returns the config;
    None, having done nothing, where this process was not asked to virtualize tokens.

    Raises:
        HookError, UnsupportedModeError: what was built cannot be served.
    """
    global _runtime
    config = from_environment()
    if config is None:
        return None
    from vtoken_sglang.engine.attention.backends import verify_backend
    from vtoken_sglang.engine.compat.built import refuse_runtime

    refuse_runtime(scheduler)
    verify_backend(scheduler.tp_worker.model_runner, config)
    if config.prunes:
        from vtoken_sglang.engine.runtime.runtime import Runtime

        _runtime = Runtime(scheduler, config)
    return config
