"""The eviction pass of a safe point: which requests' policies are asked, and what they evict.

How many tokens a request loses follows from lengths the host knows, so host and device lengths
agree whatever the scores say. Policies that look at positions alone are asked on the host. For the
others, on CUDA, the selection is enqueued behind the last forward and its positions are taken a
fixed number of passes later. Until then the request is not asked again and nothing else may be
evicted from it, so the positions are still alive and below the open page when they are taken.

The pass changes nothing but what `RequestState` says of it; the runtime evicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from vtoken_sglang.core.device_work import DeviceWork, WorkAtOnce
from vtoken_sglang.core.types import Int64Array
from vtoken_sglang.engine.observe.observer import Observer
from vtoken_sglang.engine.request_state import PendingSelection, RequestState
from vtoken_sglang.engine.runtime.ranks import Ranks
from vtoken_sglang.engine.runtime.row_owners import Candidate
from vtoken_sglang.options import RequestOptions
from vtoken_sglang.policy.base import Policy, PolicyError, PolicyView
from vtoken_sglang.policy.eviction import (
    EvictionPlan,
    check_selected,
    due,
    lowest,
    plan_eviction,
    score_tokens,
)


class Ahead(Enum):
    """How far ahead of its interval a policy may be asked.

    NEVER: not at all.
    USEFULLY: when a page, and a quarter of the interval, came since it was asked last. With a pool
        that stays full this comes up in every step, and an eviction that frees no page only costs.
    ALWAYS: when a token came: SGLang would retract requests next.
    """

    NEVER = "never"
    USEFULLY = "usefully"
    ALWAYS = "always"

    def due(self, options: RequestOptions, new: int, page_size: int) -> bool:
        """Whether to ask after `new` tokens."""
        if self is Ahead.NEVER or not options.prunes:
            return False
        return new >= (1 if self is Ahead.ALWAYS else max(page_size, options.interval // 4))


@dataclass(slots=True)
class Outcome:
    """A request's part in a pass.

    Fields:
        asked: its policy was asked in this pass. first: for the first time.
        early: ahead of its interval.
        evicted: int64, ascending; None while nothing has come.
        error: its policy failed: the request is to be ended, and is not asked again.
    """

    state: RequestState
    asked: bool = False
    first: bool = False
    early: bool = False
    evicted: Int64Array | None = None
    error: PolicyError | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A policy that is to select: how many tokens, and of which."""

    outcome: Outcome
    policy: Policy
    plan: EvictionPlan


class EvictionPass:
    """Eviction passes of one scheduler.

    Args:
        work: where selections that read keys or attention are enqueued.
        device: of the model. ranks: whose scores are averaged before anything is selected.
    """

    def __init__(
        self,
        observer: Observer,
        work: DeviceWork,
        device: torch.device,
        page_size: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._observer, self._work = observer, work
        self._device, self._page_size = device, page_size
        self._ranks = Ranks() if ranks is None else ranks
        self._now = 0

    def run(
        self, candidates: Iterable[Candidate], ahead: Ahead, *, settle: bool = False
    ) -> list[Outcome]:
        """Ask every candidate's policy that is due by now or `ahead`, and take what is due.

        Args:
            settle: take everything that is on its way, whenever it is due, and wait for it.
        """
        self._now += 1
        outcomes: list[Outcome] = []
        asked: list[Asked] = []
        for candidate in candidates:
            state = candidate.state
            outcome = Outcome(state)
            outcomes.append(outcome)
            if state.failed or state.policy is None:
                continue
            self._observer.keep_prefix_scores(state)
            if state.selection is None and candidate.evictable_len is not None:
                plan = self._plan(outcome, candidate, candidate.evictable_len, ahead)
                if plan is not None:
                    asked.append(Asked(outcome, state.policy, plan))
        self.select(asked)
        for outcome in outcomes:
            self.take(outcome, settle)
        return outcomes

    def _plan(
        self, outcome: Outcome, candidate: Candidate, evictable_len: int, ahead: Ahead
    ) -> EvictionPlan | None:
        """How many tokens go, and of which; None if it is not time to ask, or none go."""
        state, options = outcome.state, outcome.state.options
        length = state.record.kv_committed_len
        on_time = candidate.prompt or due(options, state.evicted_at, length)
        if not on_time and not ahead.due(options, length - state.evicted_at, self._page_size):
            return None
        if not self._observer.ready(state):
            return None
        outcome.asked, outcome.early, outcome.first = True, not on_time, state.evicted_at == 0
        state.evicted_at = length
        return plan_eviction(
            state.counted_positions(length),
            logical_len=length,
            options=options,
            eligible_below=evictable_len,
        )

    def select(self, asked: Sequence[Asked]) -> None:
        """Start the selections, those that look at keys or attention as one piece of work."""
        by_position: list[Asked] = []
        by_model: list[Asked] = []
        for one in asked:
            reads = one.policy.reads_keys or one.policy.observation() is not None
            (by_model if reads else by_position).append(one)
        if by_position:
            self._start(by_position, WorkAtOnce(), lambda one: one.plan.view())
        if by_model:
            self._start(by_model, self._work, self._view, self._ranks)

    def _view(self, one: Asked) -> PolicyView:
        view = one.plan.view(self._device)
        return self._observer.see(one.outcome.state, one.policy, view)

    def _start(
        self,
        asked: Sequence[Asked],
        work: DeviceWork,
        view: Callable[[Asked], PolicyView],
        ranks: Ranks | None = None,
    ) -> None:
        def select() -> torch.Tensor:
            scores = [_scores(one, view(one)) for one in asked]
            if ranks is not None and ranks.count > 1:
                sizes = [len(part) for part in scores]
                scores = list(torch.split(ranks.mean(torch.cat(scores)), sizes))
            plans = (one.plan for one in asked)
            return torch.cat([lowest(*pair) for pair in zip(scores, plans, strict=True)])

        found, start = work.start(select), 0
        for one in asked:
            end = start + 1 + one.plan.count
            one.outcome.state.selection = PendingSelection(
                one.policy, found, start, end, due=self._now + work.lag
            )
            start = end

    def take(self, outcome: Outcome, settle: bool) -> None:
        """Take what the request's policy selected, once it is due. A policy that fails, which may
        be anybody's, ends the request that asked for it with its error; the others go on."""
        state = outcome.state
        pending = state.selection
        if pending is None or not (settle or self._now >= pending.due):
            return
        state.selection = None
        try:
            if outcome.error is not None:
                raise outcome.error
            part = pending.found.take()[pending.start : pending.end]
            outcome.evicted = check_selected(pending.policy, part)
        except PolicyError as error:
            state.failed = True
            outcome.asked, outcome.error = False, error


def _scores(one: Asked, view: PolicyView) -> torch.Tensor:
    """The policy's scores. One that fails scores NaN: on every rank then, as ranks are averaged."""
    try:
        return score_tokens(one.policy, view, one.plan)
    except PolicyError as error:
        one.outcome.error = error
        return torch.full((len(one.plan.positions),), torch.nan, device=view.positions.device)


def skip_tree_owned(state: RequestState, evicted: Int64Array) -> Int64Array:
    """Strategy `skip`: decided as under every other, but tree-owned pages are left as they are.

    Returns the private ones of `evicted`; the others count as evicted for the policy alone.
    """
    if state.options.shared != "skip":
        return evicted
    shared = evicted < state.record.cache_protected_len
    state.skipped = np.concatenate([state.skipped, evicted[shared]])
    return evicted[~shared]
