"""SGLang's admission pass and decode step over the fake engine, as far as memory is concerned."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from tests.helpers.fake_engine import FakeEngine, FakeRequest
from tests.helpers.prefix_engine import PrefixEngine
from vtoken_sglang.engine.admission.budget import FootprintBudget, RequestBudget
from vtoken_sglang.engine.hooks import admission as capacity_hooks

AnyEngine = FakeEngine | PrefixEngine
TREE: Any = SimpleNamespace(supports_mamba=lambda: False, evictable_size=lambda: 0)


def budget_of(sim: FakeEngine, *running: FakeRequest, ratio: float = 0.5) -> PrefillBudget:
    """The budget of a pass, charged with the running requests as `PrefillAdder` does it. `ratio`:
    share of the tokens they may generate that SGLang reserves."""
    budget = capacity_hooks.create_budget(
        lambda allocator, tree, **options: PrefillBudget(allocator, tree, **options),
        sim.allocator,
        TREE,
    )
    adder = SimpleNamespace(memory_budget=budget, new_token_ratio=ratio)
    for request in running:
        budget.total_offset += capacity_hooks.running_reserve(stock_reserve, adder, request)
    return budget


def stock_reserve(adder: Any, request: FakeRequest) -> float:
    left = request.sampling_params.max_new_tokens - len(request.output_ids)
    return float(left * adder.new_token_ratio)


def waiting(sim: FakeEngine, rid: str, prompt: int, new: int, **options: Any) -> FakeRequest:
    request = sim.queue(rid, **options)
    request.prompt_len = prompt
    request.sampling_params.max_new_tokens = new
    request.sampling_params.ignore_eos = False
    return request


def asked_about(
    request: Any, budget: Any, running: Sequence[Any] = (), *, alone: bool = False
) -> Any:
    """What `PrefillAdder` is lent for one request."""
    if isinstance(budget, FootprintBudget):
        return RequestBudget(budget, request, running, alone)
    return budget


def ask(budget: Any, request: FakeRequest, *running: FakeRequest, chunk: int | None = None) -> bool:
    """What `PrefillAdder.add_one_req` asks; charges the request when it is admitted."""
    extend = len(request.full_untruncated_fill_ids) - request.prefix_len
    new = request.sampling_params.max_new_tokens
    budget = asked_about(request, budget, running, alone=not running and not budget.current_offset)
    fits, limit = budget.check_prefill(
        extend_input_len=extend,
        total_tokens=extend + new + budget.page_size,
        max_new_tokens=new,
        input_tokens=extend,
        swa_host_hit_length=0,
        chunk_limit=chunk,
    )
    if fits:
        chunked = limit is not None and limit < extend
        budget.reserve(limit if chunked else extend, 0 if chunked else new)
    return fits


def set_lengths(sim: AnyEngine, chunk: int | None = 64, context: int = 8192) -> None:
    """What SGLang's scheduler derives from its pool, chunk size and model."""
    vars(sim.scheduler).update(
        max_req_len=sim.total - 1,
        max_req_input_len=sim.total - 6,
        max_new_tokens_limit=None,
        chunked_prefill_size=chunk,
        sliding_window_size=None,
        page_size=sim.page_size,
        kv_shard_widening=1,
        model_config=SimpleNamespace(context_len=context),
    )


def decode_step(sim: AnyEngine, requests: list[Any], over: Sequence[Any] = ()) -> bool:
    """`update_running_batch` up to its memory check: whether the step fits, relief included.
    `over`: further requests that run, whose last token is in flight."""
    need = decode_need(sim, requests)
    batch = SimpleNamespace(reqs=requests, new_tokens_required_next_decode=lambda: need)
    sim.scheduler._reqs_finishing_inflight = lambda _batch: list(over)
    fits: bool = capacity_hooks.relieve_before_retraction(
        lambda *_: step_fits(sim, requests), sim.scheduler, batch
    )
    return fits


def step_fits(sim: AnyEngine, requests: list[Any]) -> bool:
    """`check_decode_mem`, asked again after each retraction: the tree gives up what it can."""
    fits: bool = sim.allocator.check_decode_capacity(
        num_tokens=decode_need(sim, requests), tree_cache=getattr(sim, "tree", None)
    )
    return fits


def decode_need(sim: AnyEngine, requests: list[Any]) -> int:
    """`new_tokens_required_next_decode`."""
    return sum(r.kv.kv_committed_len % sim.page_size == 0 for r in requests) * sim.page_size
