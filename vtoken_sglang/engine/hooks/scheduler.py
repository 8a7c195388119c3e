"""Hooks of the scheduler process. Each is a few lines; the work is in `runtime.Runtime`.

With no policy (arms native and hook-only) there is no runtime and every hook passes through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vtoken_sglang.engine.plugin.attestation import ATTESTATION_KEY, expected_attestation
from vtoken_sglang.engine.plugin.hook import CallOut, hook
from vtoken_sglang.engine.plugin.installation import exit_if_refused, require_verified
from vtoken_sglang.engine.runtime.current import current, start

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.invariant_checker import (
        SchedulerInvariantChecker,
    )
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


@hook(
    after="sglang.srt.managers.scheduler.Scheduler.get_init_info",
    why="proves to the launcher that this scheduler runs with every hook in place",
    remove_when="SGLang fails when a plugin fails",
)
def attest(info: dict[str, Any], scheduler: Scheduler) -> dict[str, Any]:
    """Verify the built objects and start the runtime, for the event loop comes next; then attest
    to the launcher."""
    with exit_if_refused():
        config = start(scheduler)
        if config is not None:
            require_verified()
            info[ATTESTATION_KEY] = expected_attestation(config)
    return info


@hook(
    around="sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
    why="rows, counts and ledger change between two forwards, nowhere else",
    remove_when="SGLang calls plugins before it plans a batch",
)
def before_schedule(original: Callable[..., Any], scheduler: Scheduler, **batches: Any) -> Any:
    """The entry is the safe point: the previous forward's reads of the rows are fenced here, and
    nothing of the next batch has been merged, stashed or allocated."""
    if (runtime := current()) is not None:
        runtime.safe_point(batches["running_batch"], batches["last_batch"])
    return original(scheduler, **batches)


@hook(
    around="sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.free_kv_row",
    why="a pruned row does not name the pages it holds; stock freeing would free the sink page",
    remove_when="free_kv_row asks a row owner",
)
def free_row_segments(
    original: Callable[..., Any],
    tree: BasePrefixCache,
    kv: ReqKvInfo,
    ranges: list[tuple[int, int]],
) -> None:
    """A pruned row is freed from its ledger: it has zeros, and packed pages stand at no position of
    their own."""
    if (runtime := current()) is not None and runtime.owns(kv):
        runtime.release(kv)
        return
    original(tree, kv, ranges)


@hook(
    around="sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
    why="state of a row must not survive into the next request (finish, abort, retraction)",
    remove_when="the pool offers a row-release listener",
)
def free_request_row(original: Callable[..., Any], pool: ReqToTokenPool, request: Req) -> None:
    """The row's state ends with it, before the row is reused."""
    row = request.kv.req_pool_idx
    original(pool, request)
    if (runtime := current()) is not None:
        runtime.forget_row(row)


@hook(
    after="sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
    why="publish=never must hold before the first chunk is stashed into the tree",
    remove_when="a request can opt out of insertion by a parameter",
)
def keep_prompt_private(
    _result: None, scheduler: Scheduler, request: Req, is_retracted: bool = False
) -> None:
    """A request entered the queue: `publish=never` must hold from the first chunk."""
    if (runtime := current()) is not None:
        runtime.on_queued(request, is_retracted)


@hook(
    around="sglang.srt.managers.scheduler.Scheduler.on_idle",
    why="the idle leak check needs pending copies settled",
    remove_when="SGLang asks listeners to drain",
)
def drain_when_idle(original: Callable[..., Any], scheduler: Scheduler) -> Any:
    """The leak check must find nothing held by a copy."""
    if (runtime := current()) is not None:
        runtime.idle()
    return original(scheduler)


@hook(
    around="sglang.srt.managers.scheduler.Scheduler.flush_cache",
    why="a late copy would write into pages that the flush gave away",
    remove_when="SGLang asks listeners to drain",
)
def drain_before_flush(
    original: Callable[..., Any], scheduler: Scheduler, *args: Any, **kw: Any
) -> Any:
    """A flush resets the allocator. Kept scores go with the prefixes that they belong to. SGLang
    refuses a flush unless it is idle; then a forward may still read the rows, so nothing is
    committed here."""
    runtime = current()
    if runtime is not None and scheduler.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        runtime.drain()
        runtime.observer.prefix_scores.clear()
    return original(scheduler, *args, **kw)


def private_tokens_of(kv: ReqKvInfo) -> int | None:
    """Tokens of the pages that a record's request holds outside the tree; None: as
    SGLang counts."""
    runtime = current()
    return None if runtime is None else runtime.private_tokens(kv)


@hook(
    around="sglang.srt.managers.scheduler_components.pool_stats_observer.kv_private_tokens",
    why="SGLang's leak checks take a request to hold every page that its length covers",
    remove_when="the checks ask the holder of a record for its size",
    call_out=CallOut(
        path="sglang.srt.managers.scheduler_components.pool_stats_observer.private_tokens_of",
        function=private_tokens_of,
    ),
)
def count_private_tokens(original: Callable[..., int], kv: ReqKvInfo, page_size: int) -> int:
    """A pruned request's pages are counted by its ledger."""
    held = private_tokens_of(kv)
    return original(kv, page_size) if held is None else held


@hook(
    after=(
        "sglang.srt.managers.scheduler_components.invariant_checker"
        ".SchedulerInvariantChecker._get_total_uncached_sizes"
    ),
    why="destinations of an ended request's copy are in no record",
    remove_when="the checker asks listeners for held tokens",
)
def count_orphans(sizes: tuple[int, int], _checker: SchedulerInvariantChecker) -> tuple[int, int]:
    """Add pages that only a pending copy of an ended request holds; no record counts them."""
    runtime = current()
    if runtime is None:
        return sizes
    full, sliding_window = sizes
    return full + runtime.orphaned_tokens(), sliding_window


@hook(
    after="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
    why="counters of this package in /server_info",
    remove_when="SGLang lets plugins contribute internal state",
)
def add_state(output: Any, _scheduler: Scheduler, *_: Any, **__: Any) -> Any:
    """Counters under "vtoken" in `/server_info`."""
    if (runtime := current()) is not None:
        output.internal_state["vtoken"] = runtime.describe()
    return output
