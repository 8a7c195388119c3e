"""Hooks that let the scheduler admit and keep what reclaimed memory can hold.

Each passes through when there is no runtime (nothing is pruned), and those of admission when
SGLang's own formulas were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vtoken_sglang.engine.plugin.hook import hook
from vtoken_sglang.engine.runtime.current import current
from vtoken_sglang.errors import ConfigError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


@hook(
    around="sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.create_prefill_budget",
    why="admission charges a pruned request what it will hold, not its whole length",
    remove_when="the budget asks requests for their demand",
)
def create_budget(
    original: Callable[..., Any],
    allocator: BaseTokenToKVPoolAllocator,
    tree_cache: BasePrefixCache,
    *,
    num_mixed_decode_tokens: int = 0,
) -> Any:
    """Charge the expected footprint."""
    runtime = current()
    if runtime is None or not runtime.demand.expects:
        return original(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
    from vtoken_sglang.engine.runtime.accounting import prefill_budget

    return prefill_budget(
        runtime.demand, runtime.statistics, allocator, tree_cache, num_mixed_decode_tokens
    )


@hook(
    around=(
        "sglang.srt.managers.schedule_policy.PrefillAdder._get_running_request_total_token_offset"
    ),
    why="SGLang reserves for running requests as if nothing of them were ever given back",
    remove_when="the reserve asks requests for their demand",
)
def running_reserve(original: Callable[..., Any], adder: PrefillAdder, request: Req) -> float:
    """What a running request will still take once it is pruned, in place of every token it may
    generate."""
    stock = float(original(adder, request))
    runtime = current()
    if runtime is None or not runtime.demand.expects:
        return stock
    adder.memory_budget.stock_running += stock
    grown = runtime.demand.growth(request, adder.new_token_ratio)
    return stock if grown is None else float(grown)


@hook(
    around="sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
    why="the budget's checks do not name the request they are about",
    remove_when="the budget is handed the request",
)
def add_waiting(
    original: Callable[..., Any],
    adder: PrefillAdder,
    request: Req,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> Any:
    """Tell the budget whom the next checks are about."""
    runtime = current()
    if runtime is None or not runtime.demand.expects:
        return original(adder, request, has_chunked_req, truncation_align_size)
    with adder.memory_budget.lent_for(request, adder, has_chunked_req=has_chunked_req):
        return original(adder, request, has_chunked_req, truncation_align_size)


@hook(
    around="sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
    why="a prompt longer than the pool goes on in chunks of what is free",
    remove_when="the budget is handed the request",
)
def add_chunked(original: Callable[..., Any], adder: PrefillAdder, request: Req) -> Any:
    """The next chunk takes what is free."""
    runtime = current()
    if runtime is None or not runtime.demand.expects:
        return original(adder, request)
    with adder.memory_budget.lent_for(request, adder, has_chunked_req=True):
        return original(adder, request)


@hook(
    around="sglang.srt.managers.scheduler.Scheduler.update_running_batch",
    why="what can still be reclaimed is, before a request is retracted and computed again",
    remove_when="SGLang asks listeners for memory before it retracts",
)
def relieve_before_retraction(
    original: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch
) -> Any:
    """Make room before requests are retracted."""
    runtime = current()
    if runtime is not None:
        runtime.relief.before_decode(batch)
    return original(scheduler, batch)


@hook(
    around="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
    why="SGLang clips a request to the pool's size, as if nothing of it were ever given back",
    remove_when="the clip asks the request for its demand",
)
def lift_length(original: Callable[..., Any], scheduler: Scheduler, request: Req) -> None:
    """A request that is pruned may outgrow the pool."""
    parameters = request.sampling_params
    wanted, minimum = parameters.max_new_tokens, parameters.min_new_tokens
    original(scheduler, request)
    runtime = current()
    if runtime is None or request.to_finish is not None or not runtime.demand.expects:
        return
    try:
        allowed = runtime.limits.new_tokens(request, wanted)
    except ConfigError as error:
        request.set_finish_with_abort(str(error))
        parameters.max_new_tokens = parameters.min_new_tokens = 0
        return
    if allowed is not None:
        parameters.max_new_tokens = allowed
        parameters.min_new_tokens = min(minimum, allowed)
        runtime.statistics.outgrown_requests += runtime.demand.outgrows(request)


@hook(
    around="sglang.srt.managers.utils.validate_input_length",
    why="SGLang refuses a prompt that the pool does not hold whole",
    remove_when="the check asks the request for its demand",
)
def lift_prompt(
    original: Callable[..., Any], request: Req, max_req_input_len: int, allow_auto_truncate: bool
) -> str | None:
    """The prompt, too, of a request that `lift_length` passed."""
    runtime = current()
    if runtime is not None and runtime.demand.expects:
        max_req_input_len = runtime.limits.prompt_limit(request, max_req_input_len)
    found: str | None = original(request, max_req_input_len, allow_auto_truncate)
    return found


@hook(
    around="sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    why="a request longer than the pool would wait for ever for memory that its own lock holds",
    remove_when="a request can limit its match by a parameter",
)
def limit_match(original: Callable[..., Any], request: Req, input_len: int) -> int:
    """A request longer than the pool must not lock so much of the prefix cache that the rest of it
    finds no room."""
    longest = int(original(request, input_len))
    runtime = current()
    if runtime is None or not runtime.demand.expects:
        return longest
    limit = runtime.limits.longest_match(request)
    return longest if limit is None else min(longest, limit)
