"""SGLang's loop over an engine in a test's hands, under more requests than its pool holds: prefill
what admission lets in, else decode, and retract when a step does not fit."""

from __future__ import annotations

import pkgutil
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, match_kv_cache

from tests.helpers.admission import ask, asked_about, budget_of, decode_step, step_fits
from tests.helpers.fake_engine import ROWS, FakeRequest
from tests.helpers.prefix_engine import PrefixEngine
from tests.helpers.tree_request import TreeRequest
from vtoken_sglang.engine.hooks import admission as capacity_hooks
from vtoken_sglang.engine.hooks import scheduler as scheduler_hooks
from vtoken_sglang.engine.plugin.hook import hooks_of

CHUNK = 32
MAX_STEPS = 6000
ADMISSION_HOOKS = ("create_budget", "running_reserve", "add_waiting", "add_chunked")


def retraction_order(requests: list[Any]) -> list[Any]:
    """`_get_decode_retraction_order`: the last one goes first."""
    return sorted(
        requests, key=lambda r: (len(r.output_ids), -len(r.origin_input_ids)), reverse=True
    )


@dataclass
class Storm:
    """A storm over the fake engine.

    Fields:
        ratio: as in `budget_of`. retracted: requests that were. steps: how many it took.
        peak: maximum of requests that decoded at once.
        promptness: chance that a copy ends in a step.
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
            assert self.steps < MAX_STEPS, "nothing gets on any more"
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
            lent = asked_about(chunked, budget, self.sim.running)
            limit = lent.available_chunk_tokens(CHUNK)
            if limit is not None:
                left -= self.compute(chunked, limit)
                lent.reserve(CHUNK - left, 0, is_chunked_continuation=True)
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
        """A decode step; relief is asked once, then requests are retracted until it fits."""
        over = self.over()
        going = [request for request in self.sim.running if request not in over]
        fits = decode_step(self.sim, going, over)
        if over and not fits:
            return  # what they hold is there by the next step
        while not fits:
            assert len(going) > 1, "not even one request fits"
            self.retracted += 1
            retracted = retraction_order(going)[-1]
            going.remove(retracted)
            self.sim.retract(retracted)
            self.queue.append(retracted)
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


class TreeEngine(PrefixEngine):
    """A real tree under the product's admission, which reaches SGLang's own `PrefillAdder` through
    the same functions as in a server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *args: Any, **kwargs: Any) -> None:
        super().__init__(monkeypatch, *args, **kwargs)
        for hook in hooks_of("admission"):
            if hook.name in ADMISSION_HOOKS:
                owner, _, name = hook.target.rpartition(".")
                wrapped = _around(pkgutil.resolve_name(hook.target), hook.function)
                monkeypatch.setattr(pkgutil.resolve_name(owner), name, wrapped)
        monkeypatch.setattr(schedule_batch, "release_req", lambda *, req, **_: self.retract(req))
        self.scheduler.running_batch.batch_is_full = False

    def violations(self) -> list[str]:
        """Every page is free, owned or fenced, exactly once; rows and ledgers agree."""
        for request in self.owners():
            self.runtime.state_of(request)
        return self.runtime.health.violations(self.runtime.states.values())


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: hook(original, *args, **kwargs)


class Adder(PrefillAdder):
    """SGLang's, but for what is not about memory and reads a server's configuration."""

    def _replay_len(self, *_: Any) -> int:
        return 0

    def _account_prefill_cache_admission(self, *_: Any) -> None:
        pass


@dataclass
class TreeStorm(Storm):
    """A storm over a real tree, in SGLang's order of overlapped steps: what a forward brought is
    seen after the next one was launched.

    Fields:
        chunk: maximum tokens of a prefill.
        coming: requests that arrive later, with the step they arrive at, last one first.
        lengths: tokens that each request generates before it stops.
        happened: what the storm came across, so that a test cannot pass by missing it.
        launched: the prefill whose result is still to come: requests, and the chunked one.
        ending: requests whose last token was launched before this step.
    """

    chunk: int = CHUNK
    coming: list[tuple[int, TreeRequest]] = field(default_factory=list)
    lengths: dict[str, int] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)
    launched: tuple[list[TreeRequest], TreeRequest | None] = ([], None)
    ending: list[TreeRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler = self.sim.scheduler
        scheduler.waiting_queue, scheduler.chunked_prefill_size = self.queue, self.chunk
        scheduler.is_fully_idle = lambda **_: not Storm.busy(self)
        scheduler._add_request_to_queue = self.requeue
        scheduler.abort_request = self.must_not_abort
        evict = self.sim.tree.evict

        def evict_and_note(parameters: EvictParams) -> Any:
            found = evict(parameters)
            self.happened["evicted"] += found.num_tokens_evicted
            return found

        self.sim.tree.evict = evict_and_note

    def must_not_abort(self, message: Any) -> None:
        raise AssertionError(f"{message.rid} was given up")

    def requeue(self, request: TreeRequest, is_retracted: bool = False) -> None:
        """Of a chunked request that gave its pages to those that decode."""
        self.happened["chunks retracted"] += 1
        scheduler_hooks.keep_prompt_private(None, self.sim.scheduler, request, is_retracted)
        self.queue.append(request)

    def busy(self) -> bool:
        return super().busy() or bool(self.coming)

    def prefill_pass(self) -> list[TreeRequest]:
        sim, scheduler, batch = self.sim, self.sim.scheduler, self.sim.scheduler.running_batch
        self.ending = [r for r in sim.running if len(r.output_ids) >= self.lengths[r.rid]]
        while self.coming and self.coming[-1][0] <= self.steps:
            self.queue.append(self.coming.pop()[1])
        chunked = scheduler.chunked_req
        if chunked is not None and chunked.extend_end > chunked.prefix_len:
            checkpoint_kv_cache(chunked, sim.tree)
        batch.batch_is_full &= bool(sim.running)
        if chunked is None and (batch.batch_is_full or not self.queue):
            return []
        adder = Adder(
            sim.page_size, sim.tree, sim.allocator, batch, self.ratio, 1 << 30, self.chunk
        )
        if chunked is not None:
            scheduler.chunked_req = adder.add_chunked_req(chunked)
            self.happened["chunks"] += 1
        for request in self.queue:
            if adder.budget_state() == AddReqResult.OTHER:
                break
            new_rows = sum(not r.kv.holds_kv for r in adder.can_run_list)
            batch.batch_is_full |= new_rows >= sim.rows.available_size()
            if batch.batch_is_full:
                break
            self.match(request)
            found = adder.add_one_req(
                request,
                has_chunked_req=scheduler.chunked_req is not None,
                truncation_align_size=None,
            )
            if found != AddReqResult.CONTINUE:
                if found == AddReqResult.NO_TOKEN:
                    batch.batch_is_full = bool(adder.can_run_list or sim.running)
                break
        self.launch(adder)
        return adder.can_run_list

    def match(self, request: TreeRequest) -> None:
        """`init_next_round_input`."""
        limit = capacity_hooks.limit_match(
            TreeRequest._compute_max_prefix_len, request, len(request.tokens)
        )
        match_kv_cache(request, self.sim.tree, max_prefix_len=limit)
        request.kv.cache_protected_len = request.prefix_len

    def launch(self, adder: PrefillAdder) -> None:
        """Allocate and compute what was admitted."""
        sim, scheduler, admitted = self.sim, self.sim.scheduler, adder.can_run_list
        if adder.new_chunked_req is not None:
            assert scheduler.chunked_req is None
            scheduler.chunked_req = adder.new_chunked_req
        if admitted and scheduler.chunked_req is not None:
            scheduler.chunked_req.inflight_middle_chunks += 1
        need = sum(sim._pages(r.extend_end) - sim._pages(r.prefix_len) for r in admitted)
        assert sim.make_room(need), "admitted what there is no room for"
        for request in admitted:
            self.happened["cached prefixes"] += not request.kv.holds_kv and request.prefix_len > 0
            self.happened["resumed"] += not request.kv.holds_kv and request.retracted_stain
            sim.prefill(request)
        self.queue[:] = [request for request in self.queue if request not in admitted]

    def decode(self) -> None:
        before = len(self.sim.running)
        super().decode()
        if len(self.sim.running) < before:
            self.sim.scheduler.running_batch.batch_is_full = False

    def over(self) -> list[TreeRequest]:
        return self.ending

    def results(self) -> None:
        (prefilled, middle), running = self.launched, self.sim.running
        self.launched = self.last, self.sim.scheduler.chunked_req
        if middle is not None and middle in prefilled and middle.inflight_middle_chunks:
            middle.inflight_middle_chunks -= 1
        self.sim.publish_fresh([r for r in prefilled if r in running and r is not middle])
        for request in self.ending:
            self.sim.seen(request)
            self.sim.finish(request)
            self.happened["ended"] += 1
            self.sim.scheduler.running_batch.batch_is_full = False

    def check(self) -> None:
        super().check()
        assert self.sim.violations() == []
        pending = self.sim.runtime.reclaimer.copies.pending.values()
        forks = sum(copy.plan.new_protected_len is not None for copy in pending)
        self.happened["forks at once"] += forks > 1
        self.happened["running at once"] += len(self.sim.running) > 1
        self.happened["ended during a copy"] += self.sim.runtime.orphaned_tokens() > 0
        if not Storm.busy(self):
            scheduler_hooks.drain_when_idle(lambda _: None, self.sim.scheduler)
