"""The eviction pass of a safe point: which requests' policies are asked, and what they evict.

How many tokens a request loses follows from lengths the host knows, so host and device lengths
agree whatever the scores say. Policies that look at positions alone are asked on the host. For the
others, on CUDA, the selection is enqueued behind the last forward and its positions come back
without a wait; a later pass finds them. Until then the request is not asked again and nothing else
may be evicted from it, so the positions are still alive and below the open page when they come.

The pass changes nothing but what `RequestState` says of it; the runtime evicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from vtoken_sglang.core.device_work import DeviceWork, WorkAtOnce
from vtoken_sglang.core.types import Int64Array
from vtoken_sglang.engine.observe.observer import Observer
from vtoken_sglang.engine.request_state import PendingSelection, RequestState
from vtoken_sglang.options import RequestOptions
from vtoken_sglang.policy.base import Policy, PolicyError
from vtoken_sglang.policy.eviction import (
    EvictionPlan,
    check_selected,
    due,
    plan_eviction,
    select_on_device,
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


class EvictionPass:
    """Eviction passes of one scheduler.

    Args:
        work: where selections that read keys or attention are enqueued.
        device: of the model.
    """

    def __init__(
        self, observer: Observer, work: DeviceWork, device: torch.device, page_size: int
    ) -> None:
        self._observer, self._work = observer, work
        self._device, self._page_size = device, page_size

    def run(
        self, candidates: Iterable[tuple[RequestState, int]], ahead: Ahead
    ) -> Iterator[Outcome]:
        """Ask every candidate's policy that is due by now or `ahead`, and take what has come.

        Args:
            candidates: (request, length): positions from that length on must stay.
        """
        for state, sealed_len in candidates:
            outcome = Outcome(state)
            if not state.failed and state.policy is not None:
                self._observer.keep_prefix_scores(state)
                try:
                    if state.selection is None:
                        self._ask(outcome, state.policy, sealed_len, ahead)
                    outcome.evicted = take_selection(state)
                except PolicyError as error:  # anybody's code: only its own request ends
                    state.failed = True
                    outcome.asked, outcome.error = False, error
            yield outcome

    def _ask(self, outcome: Outcome, policy: Policy, sealed_len: int, ahead: Ahead) -> None:
        """Start the selection if it is time to. Raises PolicyError."""
        state, options = outcome.state, outcome.state.options
        length = state.record.kv_committed_len
        on_time = due(options, state.evicted_at, length)
        if not on_time and not ahead.due(options, length - state.evicted_at, self._page_size):
            return
        if not self._observer.ready(state):
            return
        outcome.asked, outcome.early, outcome.first = True, not on_time, state.evicted_at == 0
        state.evicted_at = length
        plan = plan_eviction(
            state.counted_positions(length),
            logical_len=length,
            options=options,
            eligible_below=sealed_len,
        )
        if plan is not None:
            self.start(state, policy, plan)

    def start(self, state: RequestState, policy: Policy, plan: EvictionPlan) -> None:
        """Select the evicted tokens; `take_selection` gives them, at once off CUDA.

        Raises:
            PolicyError: the policy raised an error, or its scores have a wrong shape or dtype.
        """
        assert state.selection is None, f"row {state.row} was asked twice"
        needs_device = policy.reads_keys or policy.observation() is not None

        def select() -> torch.Tensor:
            view = plan.view(self._device if needs_device else None)
            if needs_device:
                view = self._observer.see(state, policy, view)
            return select_on_device(policy, view, plan)

        work = self._work if needs_device else WorkAtOnce()
        state.selection = PendingSelection(policy, work.start(select))


def take_selection(state: RequestState) -> Int64Array | None:
    """Positions selected for eviction, ascending, once; None while none have come.

    Raises:
        PolicyError: a score was not finite.
    """
    pending = state.selection
    if pending is None or not pending.found.ready():
        return None
    state.selection = None
    return check_selected(pending.policy, pending.found.take())


def wait_for_selections(states: Iterable[RequestState]) -> None:
    """Block until every selection has come: the pool is short, and nothing else can be done."""
    for state in states:
        if state.selection is not None:
            state.selection.found.wait()


def skip_tree_owned(state: RequestState, evicted: Int64Array) -> Int64Array:
    """Strategy `skip`: decided as under every other, but tree-owned pages are left as they are.

    Returns the private ones of `evicted`; the others count as evicted for the policy alone.
    """
    if state.options.shared != "skip":
        return evicted
    shared = evicted < state.record.cache_protected_len
    state.skipped = np.concatenate([state.skipped, evicted[shared]])
    return evicted[~shared]
