"""The runtime over SGLang's own rows, allocator and records: what it prunes, when, and that the
pool adds up at every step. Copies run only when the test says so."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.fake_engine import THINNED, FakeEngine, MakeEngine
from vtoken_sglang.core.types import LAG


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_window_keeps_its_size_and_the_pool_adds_up(engine: MakeEngine, page_size: int) -> None:
    sim = engine(page_size, 1024 // page_size)
    request = sim.admit("a", 100, publish="never")
    sim.prefill(request)
    for _ in range(60):
        sim.cycle(request)
        assert sim.accounted() == sim.total
    live = sim.seen(request)
    assert live[:4] == [0, 1, 2, 3]
    assert 48 <= len(live) <= 48 + page_size
    held = sim.total - sim.allocator.available_size()
    assert held <= 48 + 3 * page_size


@pytest.mark.parametrize("page_size", [1, 16])
def test_freed_pages_are_used_by_others_and_nothing_live_changes(
    engine: MakeEngine, page_size: int
) -> None:
    sim = engine(page_size, 336 // page_size)
    first = sim.admit("first", 150, publish="never")
    second = sim.admit("second", 120, publish="never", **THINNED)
    sim.prefill(first)
    sim.prefill(second)
    sim.cycle(first, second, count=40)
    taken = sim.admit("third", 100)
    sim.prefill(taken)  # could not fit beside the two at full length
    sim.cycle(first, second, taken, count=20)
    for request in (first, second, taken):
        assert sim.seen(request)
    assert sim.accounted() == sim.total


def test_nothing_is_pruned_before_the_prompt_can_be_published(engine: MakeEngine) -> None:
    sim = engine()
    request = sim.admit("a", 100)
    sim.prefill(request)
    sim.safe_point(last=[request])
    assert len(sim.seen(request)) == 100
    sim.decode(request)
    sim.publish(request)  # the result of the prefill, processed while this decode is in flight
    assert not request.skip_radix_cache_insert
    sim.safe_point()
    assert request.skip_radix_cache_insert
    assert len(sim.seen(request)) == 48
    assert sim.accounted() == sim.total


def test_the_open_page_and_the_next_slot_survive(engine: MakeEngine) -> None:
    sim = engine(budget=20, recent=0, sink=0)
    request = sim.admit("a", 64, publish="never")
    sim.prefill(request)
    sim.decode(request)
    for _ in range(40):
        sim.cycle(request)
        last = request.kv.kv_committed_len - 1
        row = sim.rows.req_to_token[request.kv.req_pool_idx]
        assert bool((row[last // 16 * 16 : last + 1] != 0).all())


def test_tree_owned_tokens_are_masked_or_skipped_but_never_freed(engine: MakeEngine) -> None:
    sim = engine()
    masked = sim.admit("masked", 100, shared="mask")
    skipped = sim.admit("skipped", 100, shared="skip")
    for request in (masked, skipped):
        sim.prefill(request, published=True)
    sim.cycle(masked, skipped, count=2)
    assert len(sim.seen(masked)) < 60
    assert sim.seen(skipped)[:96] == list(range(96))
    assert sim.tree_tokens == 192
    assert sim.accounted() == sim.total


def test_a_request_may_refuse_to_be_pruned(engine: MakeEngine) -> None:
    sim = engine()
    request = sim.admit("a", 100, policy="none")
    sim.prefill(request)
    sim.cycle(request, count=30)
    assert len(sim.seen(request)) == 130
    assert not request.skip_radix_cache_insert
    assert sim.runtime.describe()["evicted_tokens"] == 0
    sim.finish(request)
    assert sim.allocator.available_size() == sim.total


def test_the_naive_arm_evictions_but_gives_nothing_back(engine: MakeEngine) -> None:
    naive, reclaim = engine(ablation="naive"), None
    request = naive.admit("a", 150, publish="never")
    naive.prefill(request)
    naive.cycle(request, count=20)
    evicted, held = naive.seen(request), naive.total - naive.allocator.available_size()
    assert held == 176
    assert naive.accounted() == naive.total
    naive.finish(request)
    assert naive.allocator.available_size() == naive.total
    reclaim = engine()
    request = reclaim.admit("a", 150, publish="never")
    reclaim.prefill(request)
    reclaim.cycle(request, count=20)
    assert reclaim.seen(request) == evicted
    assert reclaim.total - reclaim.allocator.available_size() <= 80


def test_copies_commit_when_due_and_before_new_ones_are_planned(engine: MakeEngine) -> None:
    sim = engine(**THINNED, budget=None)
    request = sim.admit("a", 160, publish="never")
    sim.prefill(request)
    sim.decode(request)
    sim.safe_point()
    (copy,) = sim.copies.waiting
    before = sim.allocator.available_size()
    copy.finish()
    for _ in range(LAG - 1):  # over, but not due: nothing else is planned for this row
        sim.safe_point()
        assert sim.copies.copies == [copy]
        assert sim.allocator.available_size() == before
        assert sim.accounted() == sim.total
    sim.safe_point()
    assert sim.runtime.describe()["repacks"] == 1
    assert sim.allocator.available_size() > before
    assert sim.accounted() == sim.total
    assert sim.seen(request)


# -- chunked prefill ------------------------------------------------------------------------------


def chunk(sim: FakeEngine, request: Any, end: int) -> None:
    """Launch the next chunk; the request is SGLang's chunked request meanwhile."""
    sim.scheduler.chunked_req = request
    sim.extend(request, end)


def test_a_published_prompt_is_not_pruned_between_chunks(engine: MakeEngine) -> None:
    sim = engine()
    request = sim.admit("a", 192, publish="prompt")
    for end in (64, 128):
        chunk(sim, request, end)
        sim.safe_point()
    assert len(sim.seen(request)) == 128


def test_a_private_prompt_never_holds_its_full_length(engine: MakeEngine) -> None:
    sim = engine()
    request = sim.admit("a", 320, publish="never")
    assert request.skip_radix_cache_insert
    peak = 0
    for start, end in ((0, 64), (64, 112), (112, 224), (224, 320)):
        chunk(sim, request, end)
        peak = max(peak, sim.total - sim.allocator.available_size())
        in_flight = set(range(start, end))
        sim.safe_point()
        assert in_flight <= set(sim.seen(request))  # never a token of the chunk in flight
        assert sim.accounted() == sim.total
        for copy in sim.copies.waiting:
            copy.finish()
    assert peak <= 48 + 2 * 112 + 32
    sim.scheduler.chunked_req = None
    sim.running.append(request)
    sim.safe_point(last=[request])  # the last chunk is in flight, the request no longer chunked
    assert sim.accounted() == sim.total
    sim.cycle(request, count=5)
    assert sim.accounted() == sim.total


def test_pages_of_a_chunk_in_flight_do_not_count_as_given_back(engine: MakeEngine) -> None:
    """A copy commits while its request, on its last chunk, is not worked on."""
    sim = engine(**{**THINNED, "keep": 0.75}, budget=None)
    request = sim.admit("a", 266, publish="never")
    for end in (112, 224):
        chunk(sim, request, end)
        sim.safe_point()
    (copy,) = sim.copies.waiting
    chunk(sim, request, 266)
    sim.scheduler.chunked_req = None
    sim.running.append(request)
    copy.finish()
    sim.until_due(last=[request])
    assert sim.runtime.describe()["repacks"] == 1
    assert sim.accounted() == sim.total
