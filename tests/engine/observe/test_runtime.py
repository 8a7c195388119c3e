"""The runtime with policies that look at attention: observed, evicted, late answers, forgotten."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.fake_engine import DIM, HEADS, LAYERS, FakeEngine, FakeRequest, MakeEngine
from vtoken_sglang.core.device_work import WorkAtOnce
from vtoken_sglang.engine.runtime.forwards import forward_lanes

H2O: dict[str, Any] = {"policy": "h2o", "keep": 0.5, "budget": None, "sink": 0, "recent": 8}
WANTED = 16.0


def admit(sim: FakeEngine, rid: str, prompt_len: int, **options: Any) -> FakeRequest:
    """A request with what the observer reads of SGLang's `Req`."""
    request: Any = sim.admit(rid, prompt_len, **options)
    request.extra_key = request.cache_salt = None
    return request  # type: ignore[no-any-return]


def forward(sim: FakeEngine, *requests: FakeRequest, wanted: int) -> None:
    """What a decode step shows: every request's query loves its token at position `wanted`."""
    batch: Any = SimpleNamespace(reqs=list(requests))
    observer = sim.runtime.observer
    seen = observer.prepare(forward_lanes(sim.runtime, batch, is_decode=True), is_decode=True)
    assert seen is not None

    def weights_of(lane: int) -> torch.Tensor:
        live = seen.lanes[lane].positions
        weights = torch.full((HEADS, len(live)), 0.5 / len(live))
        weights[:, live == wanted] = 0.5
        return weights

    for layer in range(LAYERS):
        observer.on_weights(seen, layer, HEADS, weights_of)


def run(sim: FakeEngine, request: FakeRequest, steps: int, wanted: int = 20) -> None:
    for _ in range(steps):
        sim.safe_point()
        sim.decode(request)
        forward(sim, request, wanted=wanted)
        for copy in sim.copies.waiting:
            copy.finish()


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_looked_at_stays(engine: MakeEngine, page_size: int) -> None:
    sim = engine(page_size, 640 // page_size, **H2O)
    request = admit(sim, "a", 100, publish="never")
    sim.prefill(request)
    run(sim, request, 30)
    live = sim.seen(request)
    assert 20 in live
    assert 5 not in live
    assert len(live) < 80
    assert sim.accounted() == sim.total


def test_a_row_that_ends_gives_its_scores_back(engine: MakeEngine) -> None:
    sim = engine(**H2O)
    free = len(sim.runtime.observer._free)
    request = admit(sim, "a", 100, publish="never")
    sim.prefill(request)
    run(sim, request, 3)
    assert len(sim.runtime.observer._free) == free - 1
    sim.retract(request)
    assert len(sim.runtime.observer._free) == free
    assert not sim.runtime.states
    sim.enter(request)
    sim.prefill(request)
    run(sim, request, 2)
    sim.finish(request)
    assert len(sim.runtime.observer._free) == free


class LateWork(WorkAtOnce):
    """Device work whose results are taken some passes later.

    Fields:
        started: selections so far.
    """

    lag = 5  # type: ignore[assignment]

    def __init__(self) -> None:
        self.started = 0

    def start(self, work: Callable[[], torch.Tensor]) -> Any:
        self.started += 1
        return super().start(work)


@pytest.fixture
def late(engine: MakeEngine) -> tuple[FakeEngine, LateWork]:
    sim = engine(**H2O)
    work = LateWork()
    sim.runtime._evictions._work = work
    return sim, work


def test_a_late_answer_is_applied_at_a_later_safe_point(late: tuple[FakeEngine, LateWork]) -> None:
    sim, work = late
    request = admit(sim, "a", 100, publish="never")
    sim.prefill(request)
    run(sim, request, 6)
    assert work.started == 1  # not asked again while the first answer is on its way
    assert len(sim.seen(request)) == 106
    run(sim, request, 1)
    live = sim.seen(request)
    assert len(live) < 70
    assert 20 in live
    assert set(range(96, 107)) <= set(live)  # what came meanwhile is untouched
    assert sim.accounted() == sim.total
    run(sim, request, 20)
    assert work.started > 1
    assert sim.accounted() == sim.total


def test_an_answer_for_an_ended_request_evicts_nothing(late: tuple[FakeEngine, LateWork]) -> None:
    sim, work = late
    first = admit(sim, "a", 100, publish="never")
    sim.prefill(first)
    run(sim, first, 3)
    assert work.started == 1
    sim.finish(first)
    second = admit(sim, "b", 100, publish="never", policy="none")
    assert second.kv.req_pool_idx == first.kv.req_pool_idx or first.kv.req_pool_idx is None
    sim.prefill(second)
    for _ in range(8):
        sim.safe_point()
        sim.decode(second)
    assert len(sim.seen(second)) == 108


def test_snapkv_does_not_prune_a_prompt_that_it_has_not_seen_the_end_of(
    engine: MakeEngine,
) -> None:
    sim = engine(**{**H2O, "policy": "snapkv"})
    request = admit(sim, "a", 96, publish="never")
    sim.scheduler.chunked_req = request
    observer = sim.runtime.observer
    for end in (32, 64):
        start, _ = request.kv.kv_allocated_len, sim.extend(request, end)
        batch: Any = SimpleNamespace(reqs=[request], prefix_lens=[start], extend_lens=[end - start])
        assert observer.prepare(forward_lanes(sim.runtime, batch, False), is_decode=False) is None
        sim.safe_point()
        assert len(sim.seen(request)) == end
    sim.extend(request, 96)
    sim.scheduler.chunked_req = None
    batch: Any = SimpleNamespace(reqs=[request], prefix_lens=[64], extend_lens=[32])
    seen = observer.prepare(forward_lanes(sim.runtime, batch, False), is_decode=False)
    assert seen is not None
    for layer in range(LAYERS):
        observer.on_layer(seen, layer, torch.randn(32, HEADS, DIM), 1.0)
    sim.running.append(request)
    sim.decode(request)
    sim.safe_point()
    assert len(sim.seen(request)) < 80
