"""The runtime in random company: requests come, grow in chunks, end, are retracted, copies are
late. After every step the pool adds up and every live token reads what was written for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.fake_engine import FakeEngine, FakeRequest
from vtoken_sglang.options import VTokenConfig

ITERATIONS = 600
CHUNK = 48


class Company:
    """Draws what happens in each iteration of SGLang's loop."""

    def __init__(self, sim: FakeEngine, seed: int) -> None:
        self.sim = sim
        self.draw = random.Random(seed)
        self.waiting: list[tuple[FakeRequest, int]] = []  # and the length to compute
        self.unpublished: list[FakeRequest] = []  # prefilled in the iteration before
        self.last: list[FakeRequest] | None = None
        self.happened: dict[str, int] = {}

    def note(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1

    def room(self, tokens: int) -> bool:
        return int(self.sim.allocator.available_size()) >= tokens + 2 * self.sim.page_size

    def iterate(self) -> None:
        """One iteration: safe point, one forward, then what its result or a client brings."""
        self.sim.safe_point(self.last)
        self.last = None
        published, self.unpublished = self.unpublished, []
        if not (self.draw.random() < 0.5 and self._extend()):
            self._decode()
        for request in published:  # the result of the prefill, one forward later
            if request in self.sim.running and not request.skip_radix_cache_insert:
                self.sim.publish(request)
                self.note("published")
        self._end_some()
        for copy in self.sim.copies.waiting:
            if self.draw.random() < 0.4:
                copy.finish()
        if self.draw.random() < 0.02:
            self.sim.runtime.drain()

    def _extend(self) -> bool:
        scheduler = self.sim.scheduler
        if scheduler.chunked_req is None:
            if not self.waiting:
                self._admit()
            request, length = self.waiting.pop(0)
            if not self.room(min(length, CHUNK)) or not self.sim.rows.free_slots:
                self.waiting.insert(0, (request, length))
                return False
            self.sim.enter(request)
        else:
            request, length = scheduler.chunked_req, self.length
        end = min(length, request.kv.kv_allocated_len + CHUNK)
        if not self.room(end - request.kv.kv_allocated_len):
            return False
        self.sim.extend(request, end)
        if end < length:
            scheduler.chunked_req, self.length = request, length
            self.note("chunk")
            return True
        scheduler.chunked_req = None
        self.sim.running.append(request)
        self.unpublished.append(request)
        self.last = [request]
        return True

    def _admit(self) -> None:
        pick = self.draw
        options: dict[str, Any] = pick.choice(
            ({"policy": "none"}, {"policy": "random", "keep": 0.4}, {"budget": 40}, {"keep": 0.8})
        )
        if options.get("policy") != "none":
            options = {**options, "interval": pick.choice((1, 5, 16))}
            options |= {"shared": pick.choice(("mask", "skip")), "recent": pick.choice((0, 12))}
        options = {**options, "publish": pick.choice(("never", "prompt"))}
        request = self.sim.queue(f"r{self.happened.get('admitted', 0)}", **options)
        request.prompt_len = pick.randint(1, 200)
        self.waiting.append((request, request.prompt_len))
        self.note("admitted")

    def _decode(self) -> None:
        ready = [r for r in self.sim.running if r.kv.kv_allocated_len < 400]
        if self.room(len(ready) * self.sim.page_size):
            self.sim.decode(*ready)
            self.note("decoded")
        elif self.sim.running:
            self._retract(self.draw.choice(self.sim.running))

    def _retract(self, request: FakeRequest) -> None:
        length = request.kv.kv_committed_len
        self.unpublished = [r for r in self.unpublished if r is not request]
        self.sim.retract(request)
        self.waiting.append((request, length))
        self.note("retracted")

    def _end_some(self) -> None:
        for request in list(self.sim.running):
            if request in self.unpublished or self.draw.random() > 0.03:
                continue
            if self.draw.random() < 0.3:
                self._retract(request)
                continue
            if request.decode_batch_idx and self.draw.random() < 0.5:
                request.kv.kv_committed_len -= 1  # ended by a stop token: one slot too many
            self.sim.finish(request)
            self.note("ended")

    def check(self) -> None:
        assert self.sim.accounted() == self.sim.total
        for request in self.sim.owners():
            assert self.sim.seen(request) or not request.kv.kv_allocated_len


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_company(monkeypatch: pytest.MonkeyPatch, page_size: int, seed: int) -> None:
    config = VTokenConfig(policy="streaming_llm", keep=0.5, check=True)
    sim = FakeEngine(monkeypatch, config, page_size, 768 // page_size)
    company = Company(sim, seed)
    for _ in range(ITERATIONS):
        company.iterate()
        company.check()
    for what in ("admitted", "chunk", "decoded", "published", "retracted", "ended"):
        assert company.happened[what] >= 8, (what, company.happened)
    state = sim.runtime.describe()
    assert state["evicted_tokens"] > 500
    assert (state["repacks"] >= 5) == (page_size > 1)
    if sim.scheduler.chunked_req is not None:
        sim.finish(sim.scheduler.chunked_req)
        sim.scheduler.chunked_req = None
    for request in list(sim.running):
        sim.finish(request)
    sim.runtime.drain()
    sim.runtime.health.idle(sim.runtime.states.values())
    assert sim.allocator.available_size() == sim.total
