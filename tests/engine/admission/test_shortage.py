"""What is done when a decode step does not fit, before SGLang takes requests back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.admission import decode_step
from tests.helpers.fake_engine import THINNED, FakeEngine, FakeRequest, MakeEngine
from vtoken_sglang.engine.hooks import scheduler as scheduler_hooks
from vtoken_sglang.engine.runtime.eviction_pass import Ahead
from vtoken_sglang.options import RequestOptions, VTokenConfig

LAZY: dict[str, Any] = {"publish": "never", "interval": 512}


def full_pool(
    engine: MakeEngine, spare: int = 0, **settings: Any
) -> tuple[FakeEngine, list[FakeRequest]]:
    """Two requests that fill the pool but for `spare` pages and are not due for long; the next step
    needs two pages."""
    sim = engine(pages=16 + spare, **settings)
    requests = [sim.admit(rid, 127, **LAZY) for rid in ("a", "b")]
    for request in requests:
        sim.prefill(request)
    sim.decode(*requests)
    assert sim.allocator.available_size() == 16 * spare
    return sim, requests


@pytest.mark.parametrize(
    ("options", "spare"), [({}, 0), ({**THINNED, "budget": None}, 1)], ids=["window", "scattered"]
)
def test_evicting_ahead_of_time_makes_room(
    engine: MakeEngine, options: dict[str, Any], spare: int
) -> None:
    """Dead pages of a window come back at once, scattered ones after the copies that empty them,
    which need a page to begin with."""
    sim, requests = full_pool(engine, spare, **options)
    copies = sim.runtime.reclaimer.copies
    copies.wait = lambda _timeout: [copy.finish() for copy in sim.copies.waiting]  # type: ignore
    assert decode_step(sim, requests)
    found = sim.runtime.statistics
    assert found.retractions_avoided == 1
    assert found.early_evictions == 2
    assert found.freed_pages > found.taken_pages
    assert sim.accounted() == sim.total
    sim.decode(*requests)
    for request in requests:
        assert sim.seen(request)


def test_switched_off_the_step_does_not_fit(engine: MakeEngine) -> None:
    sim, requests = full_pool(engine, ablation="retract")
    assert not decode_step(sim, requests)
    found = sim.runtime.statistics
    assert (found.retractions_avoided, found.early_evictions) == (0, 0)


@pytest.mark.parametrize("ablation", ["", "retract"])
def test_what_a_copy_holds_is_waited_for(engine: MakeEngine, ablation: str) -> None:
    """The pool lacks those pages because of us: SGLang would end the last request for them."""
    options: dict[str, Any] = {**THINNED, "budget": None, "publish": "never", "interval": 128}
    sim = engine(pages=13, ablation=ablation, **options)
    request = sim.admit("a", 127)
    sim.prefill(request)
    sim.decode(request)
    sim.safe_point()  # a copy is submitted, and is late
    assert sim.runtime.describe()["held_pages"] > 1
    while sim.allocator.available_size() or request.kv.kv_committed_len % 16:
        sim.decode(request)
    assert decode_step(sim, [request])
    assert bool(sim.runtime.statistics.early_evictions) == (not ablation)
    assert sim.accounted() == sim.total
    assert sim.seen(request)


def test_nothing_is_done_while_the_step_fits(engine: MakeEngine) -> None:
    sim, requests = full_pool(engine)
    sim.finish(requests.pop())
    assert decode_step(sim, requests)
    assert sim.runtime.statistics.early_evictions == 0


def test_a_safe_point_evicts_ahead_of_time_when_pages_run_out(engine: MakeEngine) -> None:
    sim, requests = full_pool(engine)
    sim.safe_point()
    assert sim.runtime.statistics.early_evictions == 2
    assert decode_step(sim, requests)
    assert sim.runtime.statistics.retractions_avoided == 1  # once, not at both


def test_a_pool_that_stays_full_is_not_evicted_from_in_every_step(engine: MakeEngine) -> None:
    """An eviction that frees no page only costs: at a safe point it waits for a page of new tokens
    and a quarter of the interval; before SGLang retracts a request it does not wait."""
    sim, requests = full_pool(engine)
    sim.runtime.relief.wanted = lambda _running: True  # type: ignore[method-assign]
    found = sim.runtime.statistics
    for _ in range(40):
        sim.safe_point()
        assert found.early_evictions == 2
        sim.decode(*requests)
    sim.runtime._relieve(SimpleNamespace(reqs=requests))
    assert found.early_evictions == 4


@pytest.mark.parametrize(
    ("interval", "page_size", "soonest"), [(8, 16, 16), (128, 16, 32), (128, 1, 32), (2, 1, 1)]
)
def test_how_far_ahead_is_useful(interval: int, page_size: int, soonest: int) -> None:
    options = RequestOptions.resolve(
        VTokenConfig(policy="random", keep=0.5), {"interval": interval}
    )
    for ahead, first in ((Ahead.USEFULLY, soonest), (Ahead.ALWAYS, 1)):
        assert not ahead.due(options, first - 1, page_size)
        assert ahead.due(options, first, page_size)
    assert not Ahead.NEVER.due(options, 10_000, page_size)
    unpruned = RequestOptions.resolve(VTokenConfig(), None)
    assert not Ahead.ALWAYS.due(unpruned, 10_000, page_size)


def test_memory_that_came_back_opens_admission(engine: MakeEngine) -> None:
    sim, _ = full_pool(engine)
    batch = sim.scheduler.running_batch
    batch.batch_is_full = True
    sim.safe_point()
    assert not batch.batch_is_full
    batch.batch_is_full = True
    sim.safe_point()  # nothing new came back
    assert batch.batch_is_full


def test_an_eviction_opens_admission(engine: MakeEngine) -> None:
    """Its prompt is in the tree now: those that share it need less than when they were refused."""
    sim = engine()
    request = sim.admit("a", 30)
    sim.prefill(request)
    sim.decode(request)
    batch = sim.scheduler.running_batch
    batch.batch_is_full = True
    sim.safe_point()
    assert sim.runtime.statistics.evicted_tokens == 0, "below its budget: nothing comes back"
    assert not batch.batch_is_full
    batch.batch_is_full = True
    sim.safe_point()  # nothing is due
    assert batch.batch_is_full
    sim.decode(request)
    sim.safe_point()  # again: nothing new for those that wait
    assert sim.runtime.statistics.evicted_tokens == 0
    assert batch.batch_is_full


def test_retractions_are_counted(engine: MakeEngine) -> None:
    sim, requests = full_pool(engine)
    scheduler_hooks.keep_prompt_private(None, sim.scheduler, requests[0], is_retracted=True)
    assert sim.runtime.statistics.retractions == 1


def test_a_chunk_that_waits_in_vain_is_ended(engine: MakeEngine) -> None:
    from vtoken_sglang.engine.admission.shortage import MAX_IDLE_PASSES

    sim = engine()
    request = sim.admit("a", 600, publish="never")
    sim.scheduler.chunked_req = request
    ended: list[str] = []
    sim.scheduler.abort_request = lambda message: ended.append(message.rid)
    sim.runtime.demand.stalled = True
    for _ in range(MAX_IDLE_PASSES - 1):
        sim.runtime.relief.watch(running=0)
    sim.runtime.relief.watch(running=1)  # somebody runs: memory may come back
    for _ in range(MAX_IDLE_PASSES - 1):
        sim.runtime.relief.watch(running=0)
    assert ended == []
    sim.runtime.relief.watch(running=0)
    assert ended == ["a"]


def test_an_aborted_chunk_leaves_no_shortage_behind(engine: MakeEngine) -> None:
    sim = engine()
    sim.runtime.demand.stalled = True
    assert not sim.runtime.relief.wanted(running=1)  # the request that found no room is gone


@pytest.mark.parametrize("ablation", ["", "retract"])
@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_chunk_without_room_gives_its_pages_to_those_that_decode(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, in_flight: int, ablation: str
) -> None:
    """Not while a chunk of it is computed: its result would be taken for the last one's."""
    from sglang.srt.managers import schedule_batch

    sim = engine(pages=16, ablation=ablation)
    decoding = sim.admit("decoding", 127, policy="none")
    sim.prefill(decoding)
    sim.decode(decoding)
    chunked: Any = sim.admit("chunked", 900, publish="never")
    sim.extend(chunked, 128)
    chunked.prefix_len, chunked.inflight_middle_chunks = 128, in_flight
    sim.scheduler.chunked_req, sim.runtime.demand.stalled = chunked, True
    queued: list[str] = []

    def release(*, req: FakeRequest, **_: Any) -> None:
        sim.scheduler.chunked_req = None
        sim.retract(req)

    monkeypatch.setattr(schedule_batch, "release_req", release)
    sim.scheduler._add_request_to_queue = lambda request, is_retracted: queued.append(request.rid)
    assert decode_step(sim, [decoding]) == (not in_flight)
    assert queued == ([] if in_flight else ["chunked"])
    if not in_flight:
        assert sim.runtime.statistics.retractions_avoided == (not ablation)
        assert sim.accounted() == sim.total
