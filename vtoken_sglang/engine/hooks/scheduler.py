"""Hooks of the scheduler process. Each is a few lines; the work is in `runtime.Runtime`.

With no policy (arms native and hook-only) there is no runtime and every hook passes through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vtoken_sglang.engine.attention.backends import verify_backend
from vtoken_sglang.engine.plugin.attestation import ATTESTATION_KEY, expected_attestation
from vtoken_sglang.engine.plugin.installation import is_verified, refuse
from vtoken_sglang.errors import HookError, VTokenError
from vtoken_sglang.options import VTokenConfig, from_environment

if TYPE_CHECKING:
    from vtoken_sglang.engine.runtime.runtime import Runtime

_runtime: Runtime | None = None


def attest(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """AFTER `Scheduler.get_init_info`: verify the built objects, then attest to the launcher.

    The event loop starts after this, so it is also where the runtime is made.
    """
    config = from_environment()
    if config is None:
        return info
    try:
        _verify_scheduler(scheduler, config)
        _start_runtime(scheduler, config)
    except VTokenError as error:
        refuse(error)
    info[ATTESTATION_KEY] = expected_attestation(config)
    return info


def _verify_scheduler(scheduler: Any, config: VTokenConfig) -> None:
    from vtoken_sglang.engine.compat.built import refuse_runtime

    if not is_verified():
        raise HookError("scheduler", "the hooks of this process were never verified")
    refuse_runtime(scheduler)
    verify_backend(scheduler.tp_worker.model_runner, config)


def _start_runtime(scheduler: Any, config: VTokenConfig) -> None:
    global _runtime
    if config.prunes:
        from vtoken_sglang.engine.observe.forward_link import install_observer
        from vtoken_sglang.engine.runtime.runtime import Runtime

        _runtime = Runtime(scheduler, config)
        install_observer(_runtime.observer)


def before_schedule(original: Callable[..., Any], scheduler: Any, **batches: Any) -> Any:
    """AROUND `Scheduler.get_next_batch_to_run`: its entry is the safe point.

    The previous forward's reads of the rows are fenced here, and nothing of the next batch has
    been merged, stashed or allocated.
    """
    if _runtime is not None:
        _runtime.safe_point(batches["running_batch"], batches["last_batch"])
    return original(scheduler, **batches)


def free_row_segments(
    original: Callable[..., Any], tree: Any, kv: Any, ranges: list[tuple[int, int]]
) -> None:
    """AROUND `BasePrefixCache.free_kv_row`: a pruned row is freed from its ledger.

    Its row has zeros, and packed pages stand at no position of their own, so the row does not say
    which pages it holds.
    """
    if _runtime is not None and _runtime.owns(kv):
        _runtime.release(kv)
        return
    original(tree, kv, ranges)


def free_request_row(original: Callable[..., Any], pool: Any, request: Any) -> None:
    """AROUND `ReqToTokenPool.free`: the row's state dies with it, before the row is reused."""
    row = request.kv.req_pool_idx
    original(pool, request)
    if _runtime is not None:
        _runtime.forget_row(row)


def keep_prompt_private(
    _result: None, scheduler: Any, request: Any, is_retracted: bool = False
) -> None:
    """AFTER `Scheduler._add_request_to_queue`: `publish=never` must hold from the first chunk."""
    if _runtime is not None:
        _runtime.on_queued(request, is_retracted)


def drain_when_idle(original: Callable[..., Any], scheduler: Any) -> Any:
    """AROUND `Scheduler.on_idle`: the leak check must find nothing held by a copy."""
    if _runtime is not None:
        _runtime.drain()
        if scheduler.is_fully_idle():
            _runtime.assert_idle()
    return original(scheduler)


def drain_before_flush(original: Callable[..., Any], scheduler: Any, *args: Any, **kw: Any) -> Any:
    """AROUND `Scheduler.flush_cache`: a flush resets the allocator; a late copy would hit it.

    Kept scores go with the prefixes that they belong to. SGLang refuses a flush unless it is idle;
    then a forward may still read the rows, so nothing is committed here."""
    if _runtime is not None and scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        _runtime.drain()
        _runtime.observer.seeds.clear()
    return original(scheduler, *args, **kw)


def count_orphans(sizes: tuple[int, int], _checker: Any) -> tuple[int, int]:
    """AFTER `SchedulerInvariantChecker._get_total_uncached_sizes`: add pages that only a pending
    copy of an ended request holds; no request's record counts them."""
    if _runtime is None:
        return sizes
    full, sliding_window = sizes
    return full + _runtime.orphaned_tokens(), sliding_window


def add_state(output: Any, _scheduler: Any, *_: Any, **__: Any) -> Any:
    """AFTER `Scheduler.get_internal_state`: counters under "vtoken" in `/server_info`."""
    if _runtime is not None:
        output.internal_state["vtoken"] = _runtime.describe()
    return output
