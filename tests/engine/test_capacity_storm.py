"""Storms whose pruning lags, step by step over SGLang's own allocator: requests wait, some are
taken back, all end; an allocation never fails."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.admission import ask, budget_of, decode_step, waiting
from tests.helpers.fake_engine import ROWS, FakeEngine, FakeRequest, MakeEngine
from vtoken_sglang.engine.capacity_budget import FootprintBudget

CHUNK = 32
MOST_STEPS = 6000


@dataclass
class Storm:
    """SGLang's loop: a prefill pass if somebody is let in, else a decode step.

    Fields:
        ratio: as in `budget_of`. retracted: requests taken back. steps: how many it took.
        peak: most requests that decoded at once.
    """

    sim: FakeEngine
    draw: random.Random
    queue: list[FakeRequest]
    ratio: float = 0.5
    retracted: int = 0
    steps: int = 0
    peak: int = 0
    last: list[FakeRequest] = field(default_factory=list)

    def run(self) -> None:
        while self.queue or self.sim.running or self.sim.scheduler.chunked_req:
            self.steps += 1
            assert self.steps < MOST_STEPS, "nothing gets on any more"
            self.sim.safe_point(self.last)
            self.last = self.prefill_pass()
            if not self.last and self.sim.running:
                self.decode()
            self.peak = max(self.peak, len(self.sim.running))
            assert self.sim.accounted() == self.sim.total
            for copy in self.sim.copies.waiting:
                if self.draw.random() < 0.4:  # copies are late
                    copy.finish()

    def prefill_pass(self) -> list[FakeRequest]:
        budget: Any = budget_of(self.sim, *self.sim.running, ratio=self.ratio)
        left, done = CHUNK, []
        chunked = self.sim.scheduler.chunked_req
        if chunked is not None:
            if isinstance(budget, FootprintBudget):
                budget.consider(chunked, self.sim.running, False)
            limit = budget.available_chunk_tokens(CHUNK)
            if limit is not None:
                left -= self.compute(chunked, limit)
                budget.reserve(CHUNK - left, 0, is_chunked_continuation=True)
                done.append(chunked)
        while self.queue and left > 0 and len(self.sim.running) + len(done) < ROWS - 2:
            request = self.queue[0]
            if self.sim.scheduler.chunked_req or not ask(
                budget, request, *self.sim.running, *done, chunk=left
            ):
                break
            self.sim.enter(self.queue.pop(0))
            left -= self.compute(request, left)
            done.append(request)
        return [request for request in done if request is not self.sim.scheduler.chunked_req]

    def compute(self, request: FakeRequest, limit: int) -> int:
        """A chunk of the prompt, or the rest of it; the number of tokens."""
        start = request.kv.kv_allocated_len
        end = min(request.prompt_len, start + limit)
        self.sim.extend(request, end)
        whole = end == request.prompt_len
        self.sim.scheduler.chunked_req = None if whole else request
        if whole:
            if not request.skip_radix_cache_insert:
                self.sim.publish(request)
            self.sim.running.append(request)
        return end - start

    def decode(self) -> None:
        running = self.sim.running
        while not decode_step(self.sim, running):
            assert len(running) > 1, "not even one request fits"
            self.retracted += 1
            victim = running[-1]
            self.sim.retract(victim)
            self.queue.append(victim)
        self.sim.decode(*running)
        for request in list(running):
            if len(request.output_ids) >= request.sampling_params.max_new_tokens:
                self.sim.finish(request)


def options_of(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.15:
        return {"policy": "none"}
    return {
        "policy": draw.choice(["random", "streaming_llm"]),
        "interval": draw.choice([1, 16, 48]),
        "shared": draw.choice(["skip", "mask"]),
        "publish": draw.choice(["prompt", "never", "never"]),
        **draw.choice([{"keep": 0.4}, {"budget": 48}]),
    }


def storm(engine: MakeEngine, seed: int, pages: int, **settings: Any) -> Storm:
    draw = random.Random(seed)
    sim = engine(16, pages, check=False, **settings)
    sim.scheduler.chunked_prefill_size = CHUNK
    queue = [
        waiting(sim, f"{n}", draw.randint(1, 180), draw.randint(1, 60), **options_of(draw))
        for n in range(24)
    ]
    found = Storm(sim, draw, queue)
    found.run()
    assert sim.allocator.available_size() + sim.runtime.orphaned_tokens() == sim.total
    return found


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_and_no_allocation_fails(engine: MakeEngine, seed: int) -> None:
    found = storm(engine, seed, pages=20)  # 320 tokens; the longest alone want 240
    assert found.peak >= 2


def test_reclaim_comes_before_retraction(engine: MakeEngine) -> None:
    """Admitted alike, with hardly anything reserved for what they generate; looks come late."""
    counts = {}
    for shortage in ("relieve", "retract"):
        sim = engine(16, 20, check=False, shortage=shortage, admission="full")
        sim.scheduler.chunked_prefill_size = CHUNK
        late = {"publish": "never", "interval": 96}
        queue = [waiting(sim, f"{n}", 20, 120, **late) for n in range(10)]
        run = Storm(sim, random.Random(1), queue, ratio=0.05)
        run.run()
        counts[shortage] = (run.retracted, sim.runtime.statistics.early_looks)
    assert counts["relieve"][0] < counts["retract"][0] / 2
    assert counts["relieve"][1] > 0  # looks ahead of time
