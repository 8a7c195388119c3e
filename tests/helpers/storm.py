"""SGLang's loop over an engine in a test's hands, under more requests than its pool holds: prefill
what admission lets in, else decode, and take back when a step does not fit."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.admission import ask, budget_of, decode_step, step_fits
from tests.helpers.fake_engine import ROWS, FakeRequest
from vtoken_sglang.engine.capacity_budget import FootprintBudget

CHUNK = 32
MOST_STEPS = 6000


def retraction_order(requests: list[Any]) -> list[Any]:
    """`_get_decode_retraction_order`: the last one goes first."""
    return sorted(
        requests, key=lambda r: (len(r.output_ids), -len(r.origin_input_ids)), reverse=True
    )


@dataclass
class Storm:
    """A storm over the fake engine.

    Fields:
        ratio: as in `budget_of`. retracted: requests taken back. steps: how many it took.
        peak: most requests that decoded at once. promptness: chance that a copy ends in a step.
        last: what the last forward computed prompts of.
    """

    sim: Any
    draw: random.Random
    queue: list[Any]
    ratio: float = 0.5
    promptness: float = 0.4
    retracted: int = 0
    steps: int = 0
    peak: int = 0
    last: list[Any] = field(default_factory=list)

    def run(self) -> None:
        while self.busy():
            self.steps += 1
            assert self.steps < MOST_STEPS, "nothing gets on any more"
            self.sim.safe_point(self.last)
            self.last = self.prefill_pass()
            if not self.last and self.sim.running:
                self.decode()
            self.results()
            self.peak = max(self.peak, len(self.sim.running))
            self.check()
            for copy in self.sim.copies.waiting:
                if self.draw.random() < self.promptness:  # copies are late
                    copy.finish()

    def busy(self) -> bool:
        return bool(self.queue or self.sim.running or self.sim.scheduler.chunked_req)

    def prefill_pass(self) -> list[Any]:
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
        """A decode step; relief is asked once, then requests are taken back until it fits."""
        over = self.over()
        going = [request for request in self.sim.running if request not in over]
        fits = decode_step(self.sim, going, over)
        if over and not fits:
            return  # what they hold is there by the next step
        while not fits:
            assert len(going) > 1, "not even one request fits"
            self.retracted += 1
            victim = retraction_order(going)[-1]
            going.remove(victim)
            self.sim.retract(victim)
            self.queue.append(victim)
            fits = step_fits(self.sim, going)
        self.sim.decode(*going)

    def over(self) -> list[Any]:
        """Requests whose last token is in flight."""
        return []

    def results(self) -> None:
        """What this step's forward, or the one before it, brought: some end."""
        for request in list(self.sim.running):
            if len(request.output_ids) >= request.sampling_params.max_new_tokens:
                self.sim.finish(request)

    def check(self) -> None:
        assert self.sim.accounted() == self.sim.total
