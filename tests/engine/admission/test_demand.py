"""Admission by expected footprint over SGLang's own allocator: who is let in, and who waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from tests.helpers.admission import TREE, ask, asked_about, budget_of, stock_reserve, waiting
from tests.helpers.fake_engine import FakeEngine, FakeRequest, MakeEngine
from vtoken_sglang.options import RequestOptions


def running(sim: FakeEngine, rid: str, prompt: int, new: int, **options: Any) -> FakeRequest:
    """A request that decodes and was pruned already."""
    request = waiting(sim, rid, prompt, new, publish="never", **options)
    sim.enter(request)
    sim.prefill(request)
    sim.cycle(request, count=3)
    return request


def test_more_is_admitted_than_full_lengths_would_allow(engine: MakeEngine) -> None:
    sim = engine(pages=64)  # 1024 tokens; a window of 48
    first = running(sim, "first", 400, 400)
    budget = budget_of(sim, first)
    request = waiting(sim, "second", 400, 400, publish="never")
    stock = PrefillBudget(sim.allocator, TREE)
    stock.total_offset += stock_reserve(SimpleNamespace(new_token_ratio=0.5), first)
    assert not ask(stock, request)
    assert ask(budget, request, first)
    assert sim.runtime.statistics.admitted_by_pruning == 1


def test_what_is_needed_now_must_be_free_now(engine: MakeEngine) -> None:
    sim = engine(pages=64)
    holders = [sim.admit(f"holder {n}", 170, policy="none") for n in range(3)]
    for holder in holders:
        holder.sampling_params.max_new_tokens = 0
        holder.sampling_params.ignore_eos = False
        sim.prefill(holder)
    request = waiting(sim, "long", 500, 10, publish="never")
    # 496 tokens are free: enough for what it will hold, not for its prompt.
    assert not ask(budget_of(sim, *holders), request, *holders)
    # In chunks its prompt never is there whole.
    assert ask(budget_of(sim, *holders), request, *holders, chunk=16)


def test_a_published_prompt_is_charged_whole_under_mask(engine: MakeEngine) -> None:
    sim = engine(pages=64)
    masked = [waiting(sim, f"m{n}", 300, 300, shared="mask") for n in range(4)]
    budget = budget_of(sim)
    admitted = [ask(budget, request) for request in masked]
    assert admitted == [True, True, False, False]  # 288 + 80 each, of 1024
    private = [waiting(sim, f"p{n}", 300, 300, publish="never") for n in range(4)]
    budget = budget_of(sim)
    # Each holds 304 until it is pruned, so the fourth waits for the first eviction, and no longer.
    assert [ask(budget, request) for request in private] == [True, True, True, False]


def test_a_fork_keeps_room_for_its_copies(engine: MakeEngine) -> None:
    sim = engine(pages=32)  # 512 tokens
    forking = waiting(sim, "f", 416, 8, shared="auto")
    other = sim.admit("other", 16, policy="none")
    other.sampling_params.max_new_tokens, other.sampling_params.ignore_eos = 0, False
    sim.prefill(other)
    # 496 are free: 432 for the prompt, but not 80 more for the copies of what it keeps.
    assert not ask(budget_of(sim, other), forking, other)
    assert ask(budget_of(sim, other), waiting(sim, "m", 416, 8, shared="mask"), other)
    assert ask(budget_of(sim), forking)  # alone: waiting would not help


def test_the_fork_of_a_running_request_keeps_its_room(engine: MakeEngine) -> None:
    sim = engine(pages=32)  # 512 tokens
    request = waiting(sim, "f", 256, 8, shared="auto")
    sim.enter(request)
    sim.prefill(request, published=True)
    newcomer = waiting(sim, "n", 150, 8)
    # 256 are free: 176 for its prompt, and 32 for pages opened soon, but not 96 for the copies.
    assert not ask(budget_of(sim, request), newcomer, request)
    request.skip_radix_cache_insert = True  # evicted from
    assert ask(budget_of(sim, request), newcomer, request)
    sim.runtime.state_of(request).fork_wanted = 4
    assert not ask(budget_of(sim, request), newcomer, request)
    sim.runtime.state_of(request).fork_wanted = 3
    assert ask(budget_of(sim, request), newcomer, request)


@pytest.mark.parametrize("shared", ["mask", "auto", "cow"])
def test_a_cached_prefix_is_charged_a_fork_only_where_one_must_come(
    engine: MakeEngine, shared: str
) -> None:
    sim = engine(pages=32)  # 512 tokens
    other = sim.admit("other", 384, policy="none")
    other.sampling_params.max_new_tokens, other.sampling_params.ignore_eos = 0, False
    sim.prefill(other)
    hit = waiting(sim, "hit", 416, 8, shared=shared)
    hit.prefix_len = hit.cached_tokens = 384
    # 128 are free: 48 for the rest of the prompt, but not 80 more for copies of the cached part,
    # which auto makes only where that gives back more than it takes.
    assert ask(budget_of(sim, other), hit, other) == (shared != "cow")


@pytest.mark.parametrize("shared", ["mask", "auto", "cow"])
def test_a_running_request_reserves_a_fork_only_where_one_must_come(
    engine: MakeEngine, shared: str
) -> None:
    sim = engine(pages=64)
    request = waiting(sim, "shares", 416, 32, shared=shared)
    request.cached_tokens = 384
    sim.enter(request)
    sim.prefill(request, published=True)
    reserved = budget_of(sim, request, ratio=1.0).total_offset
    assert reserved <= 48 if shared != "cow" else reserved > 48


def test_a_running_request_reserves_what_its_policy_will_keep(engine: MakeEngine) -> None:
    sim = engine(pages=64)
    pruned = running(sim, "pruned", 200, 4000)
    plain = running(sim, "plain", 200, 4000, policy="none")
    assert budget_of(sim, pruned).total_offset <= 48
    assert budget_of(sim, plain).total_offset == pytest.approx(1998, abs=2)


def test_an_unpruned_request_is_charged_its_whole_length(engine: MakeEngine) -> None:
    sim = engine(pages=64)
    assert not ask(budget_of(sim), waiting(sim, "a", 600, 600, policy="none"))
    assert ask(budget_of(sim), waiting(sim, "b", 600, 300, policy="none"))


@pytest.mark.parametrize("ablation", ["full-admission", "naive"])
def test_sglangs_own_budget_where_nothing_is_expected_back(
    engine: MakeEngine, ablation: str
) -> None:
    sim = engine(ablation=ablation)
    assert type(budget_of(sim)) is PrefillBudget
    request = running(sim, "a", 200, 400)
    assert budget_of(sim, request).total_offset == pytest.approx(198, abs=2)


# -- chunks of a prompt ---------------------------------------------------------------------------


def test_a_chunk_takes_what_is_free_or_waits_and_all_wait_with_it(engine: MakeEngine) -> None:
    sim = engine(pages=48)  # 768 tokens: a prompt is evicted from every 80
    request = waiting(sim, "long", 480, 10, publish="never")
    sim.enter(request)
    sim.scheduler.chunked_req = request
    sim.extend(request, 80)
    sim.extend(request, 160)
    request.prefix_len = 160
    other = sim.admit("other", 304, policy="none")
    sim.prefill(other)
    holder = sim.admit("holder", 224, policy="none")
    sim.prefill(holder)
    budget = budget_of(sim)
    lent = asked_about(request, budget, [holder])
    assert lent.available_chunk_tokens(64) == 64  # exactly: one page is kept for rounding
    sim.extend(holder, 240)
    budget = budget_of(sim)
    lent = asked_about(request, budget, [holder])
    assert lent.available_chunk_tokens(64) == 48
    assert not ask(budget, waiting(sim, "late", 8, 8), holder)
    sim.extend(holder, 288)
    budget = budget_of(sim)
    lent = asked_about(request, budget, [holder])
    assert lent.available_chunk_tokens(64) is None
    assert sim.runtime.demand.stalled
    assert sim.runtime.statistics.stalled_chunks == 1
    assert not ask(budget, waiting(sim, "later", 8, 8), holder)
    sim.safe_point()  # a chunk ended at its interval: evicts from what came before the last
    budget = budget_of(sim)
    lent = asked_about(request, budget, [holder])
    assert lent.available_chunk_tokens(64) is not None
    assert not sim.runtime.demand.stalled


@pytest.mark.parametrize("shared", ["skip", "mask", "auto"])
@pytest.mark.parametrize(("new", "fits"), [(490, True), (560, False)])
def test_the_last_chunk_of_a_published_prompt_is_reserved_whole(
    engine: MakeEngine, shared: str, new: int, fits: bool
) -> None:
    sim = engine(pages=64)  # 1024 tokens
    request = waiting(sim, "long", 400, 32, shared=shared)
    sim.enter(request)
    sim.extend(request, 256)
    request.prefix_len = request.kv.cache_protected_len = 256  # its first chunk is in the tree
    sim.scheduler.chunked_req = request
    budget = budget_of(sim)
    lent = asked_about(request, budget)
    assert lent.available_chunk_tokens(256) == 256
    lent.reserve(144, 32, is_chunked_continuation=True)
    # 768 are free: 144 for the last chunk and 32 for what it generates leave less than 592.
    assert ask(budget, waiting(sim, "late", 16, new, policy="none"), request) == fits


@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("length", [28, 29, 32])
def test_pages_opened_soon_are_those_that_decoding_takes(
    engine: MakeEngine, page_size: int, length: int
) -> None:
    sim = engine(page_size, pages=512 // page_size)
    request = sim.admit("a", length)
    sim.prefill(request)
    free = sim.allocator.available_size()
    expected = sim.runtime.demand.soon_opened([request], steps=4)
    for _ in range(4):
        sim.decode(request)
    assert free - sim.allocator.available_size() == expected


def test_chunks_are_not_expected_to_be_pruned_before_a_policy_can(engine: MakeEngine) -> None:
    """snapkv waits for the prompt's end: until then a private prompt is there whole."""
    sim = engine(pages=32)  # 512 tokens
    for policy, maximum in (("streaming_llm", 256), ("snapkv", 416)):
        request = waiting(sim, policy, 400, 10, publish="never", policy=policy)
        charge = sim.runtime.demand.charge(request, 32)
        assert charge is not None
        assert maximum - 16 <= charge.footprint.prefill <= maximum


def test_expected_and_actual_footprint_are_shown(engine: MakeEngine) -> None:
    sim = engine(pages=64)
    request = running(sim, "a", 300, 300)
    found = sim.runtime.describe()["footprint"]
    held = sim.total - sim.allocator.available_size()
    assert found["actual_tokens"] == held
    assert found["actual_tokens"] <= found["expected_tokens"] < found["full_tokens"] == 304
    sim.finish(request)
    assert set(sim.runtime.describe()["footprint"].values()) == {0}


def test_options_are_resolved_once_per_request(engine: MakeEngine) -> None:
    sim = engine()
    own, default = waiting(sim, "a", 10, 10, keep=0.5), waiting(sim, "b", 10, 10)
    options_of = sim.runtime.demand.options
    assert options_of(own) is options_of(own)
    assert (options_of(own).keep, options_of(default).budget) == (0.5, 48)  # type: ignore[union-attr]


def test_a_share_of_recent_tokens_is_part_of_what_is_held(engine: MakeEngine) -> None:
    """Sinks and recent tokens may be more than the target: then they are what is held."""
    rule = engine().runtime.demand.rule
    half = RequestOptions(policy="random", budget=100, sink=4, recent=0.5)
    most = RequestOptions(policy="random", budget=100, sink=4, recent=0.99)
    assert rule(half).target(1000) == 100
    assert rule(most).target(1000) == 103
    share = RequestOptions(policy="random", keep=0.1, sink=90, recent=0.5)
    assert [rule(share).target(length) for length in (100, 1000)] == [95, 140]
