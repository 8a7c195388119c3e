"""Hooks that let the scheduler admit and keep what reclaimed memory can hold.

Each passes through when there is no runtime (nothing is pruned), and those of admission when
SGLang's own formulas were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vtoken_sglang.engine.hooks import scheduler as scheduler_hooks
from vtoken_sglang.errors import ConfigError

if TYPE_CHECKING:
    from vtoken_sglang.engine.runtime.runtime import Runtime


def _runtime() -> Runtime | None:
    return scheduler_hooks._runtime


def create_budget(
    original: Callable[..., Any],
    allocator: Any,
    tree_cache: Any,
    *,
    num_mixed_decode_tokens: int = 0,
) -> Any:
    """AROUND `BaseTokenToKVPoolAllocator.create_prefill_budget`: charge the expected footprint."""
    runtime = _runtime()
    if runtime is None or not runtime.capacity.expects:
        return original(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
    from vtoken_sglang.engine.admission.budget import FootprintBudget

    runtime.capacity.measure()
    return FootprintBudget(
        allocator,
        tree_cache,
        demand=runtime.capacity,
        statistics=runtime.statistics,
        num_mixed_decode_tokens=num_mixed_decode_tokens,
    )


def running_reserve(original: Callable[..., Any], adder: Any, request: Any) -> float:
    """AROUND `PrefillAdder._get_running_request_total_token_offset`: what a running request will
    still take once it is pruned, in place of every token it may generate."""
    stock = float(original(adder, request))
    runtime = _runtime()
    if runtime is None or not runtime.capacity.expects:
        return stock
    adder.memory_budget.stock_running += stock
    grown = runtime.capacity.growth(request, adder.new_token_ratio)
    return stock if grown is None else float(grown)


def add_waiting(
    original: Callable[..., Any],
    adder: Any,
    request: Any,
    has_chunked_req: bool,
    truncation_align_size: int | None,
) -> Any:
    """AROUND `PrefillAdder.add_one_req`: tell the budget whom the next checks are about."""
    runtime = _runtime()
    if runtime is None or not runtime.capacity.expects:
        return original(adder, request, has_chunked_req, truncation_align_size)
    with adder.memory_budget.lent_for(request, adder, has_chunked_req=has_chunked_req):
        return original(adder, request, has_chunked_req, truncation_align_size)


def add_chunked(original: Callable[..., Any], adder: Any, request: Any) -> Any:
    """AROUND `PrefillAdder.add_chunked_req`: the next chunk takes what is free."""
    runtime = _runtime()
    if runtime is None or not runtime.capacity.expects:
        return original(adder, request)
    with adder.memory_budget.lent_for(request, adder, has_chunked_req=True):
        return original(adder, request)


def relieve_before_retraction(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """AROUND `Scheduler.update_running_batch`: make room before requests are retracted."""
    runtime = _runtime()
    if runtime is not None:
        runtime.relief.before_decode(batch)
    return original(scheduler, batch)


def lift_length(original: Callable[..., Any], scheduler: Any, request: Any) -> None:
    """AROUND `Scheduler.init_req_max_new_tokens`: a request that is pruned may outgrow the pool."""
    parameters = request.sampling_params
    wanted, minimum = parameters.max_new_tokens, parameters.min_new_tokens
    original(scheduler, request)
    runtime = _runtime()
    if runtime is None or request.to_finish is not None or not runtime.capacity.expects:
        return
    try:
        allowed = runtime.lengths.new_tokens(request, wanted)
    except ConfigError as error:
        request.set_finish_with_abort(str(error))
        parameters.max_new_tokens = parameters.min_new_tokens = 0
        return
    if allowed is not None:
        parameters.max_new_tokens = allowed
        parameters.min_new_tokens = min(minimum, allowed)
        runtime.statistics.outgrown_requests += runtime.capacity.outgrows(request)


def lift_prompt(
    original: Callable[..., Any], request: Any, max_req_input_len: int, allow_auto_truncate: bool
) -> str | None:
    """AROUND `validate_input_length`: the prompt, too, of a request that `lift_length` passed."""
    runtime = _runtime()
    if runtime is not None and runtime.capacity.expects:
        max_req_input_len = runtime.lengths.prompt_limit(request, max_req_input_len)
    found: str | None = original(request, max_req_input_len, allow_auto_truncate)
    return found


def limit_match(original: Callable[..., Any], request: Any, input_len: int) -> int:
    """AROUND `Req._compute_max_prefix_len`: a request longer than the pool must not lock so much
    of the prefix cache that the rest of it finds no room."""
    longest = int(original(request, input_len))
    runtime = _runtime()
    if runtime is None or not runtime.capacity.expects:
        return longest
    limit = runtime.lengths.longest_match(request)
    return longest if limit is None else min(longest, limit)
