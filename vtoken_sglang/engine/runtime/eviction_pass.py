"""Who dies at a look: counted on the host, named where the scores are.

The number of evicted follows from lengths the host knows, so host and device lengths agree whatever
the scores say. Policies that look at positions alone are asked on the host. For the others, on
CUDA, the choice is enqueued behind the last forward and its names come back without waiting; a
later safe point finds them (`arrived`). Until then the row is not looked at again, and nothing
else may eviction in it, so the names are still alive and still below the open page when they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken_sglang.core.device_work import Arriving, DeviceWork, WorkAtOnce
from vtoken_sglang.engine.observe.observer import Observer
from vtoken_sglang.options import RequestOptions
from vtoken_sglang.policy.base import Policy, PolicyError
from vtoken_sglang.policy.eviction import (
    EvictionPlan,
    check_selected,
    due,
    plan_eviction,
    select_on_device,
)
from vtoken_sglang.policy.registry import load_policy


class Looked(Protocol):
    """Of a request's state: what holds for it, its length at the last look, whether that failed."""

    options: RequestOptions
    last_len: int
    failed: bool


class Ahead(Enum):
    """How far ahead of its interval a request may be looked at.

    NEVER: not at all.
    USEFULLY: when a page, and a quarter of the interval, came since the last look. With a pool that
        stays full this is asked in every step, and a look that frees no page only costs.
    ALWAYS: when a token came: SGLang would take requests back next.
    """

    NEVER = "never"
    USEFULLY = "usefully"
    ALWAYS = "always"

    def due(self, options: RequestOptions, new: int, page_size: int) -> bool:
        """Whether to look after `new` tokens since the last look."""
        if self is Ahead.NEVER or not options.prunes:
            return False
        least = 1 if self is Ahead.ALWAYS else max(page_size, options.interval // 4)
        return new >= least


@dataclass(frozen=True, slots=True)
class _Pending:
    policy: Policy
    record: object
    found: Arriving


class EvictionPass:
    """EvictionPass of one scheduler's requests, by row.

    Args:
        end: (request, error) -> ends the request; called once for one whose policy failed. None:
            the error is raised.
    """

    def __init__(
        self,
        observer: Observer,
        work: DeviceWork,
        device: torch.device,
        end: Callable[[Any, PolicyError], None] | None = None,
        page_size: int = 1,
    ) -> None:
        self._observer = observer
        self._work = work
        self._device = device
        self._pending: dict[int, _Pending] = {}
        self._end, self._page_size = end, page_size
        self.failed = 0  # requests that a policy's error ended

    def take_turn(
        self,
        request: Any,
        state: Looked,
        sealed_len: int,
        live_positions: Callable[[Any, Any], NDArray[np.int64]],
        ahead: Ahead = Ahead.NEVER,
    ) -> tuple[bool, NDArray[np.int64] | None]:
        """A request's part of a safe point: `begin`, unless a look is on its way, and `arrived`.

        A policy that fails, which may be anybody's, ends the request that asked for it with its
        error; the others go on. It is not looked at again.
        """
        if state.failed:
            return False, None
        kv = request.kv
        try:
            looked = not self.waiting(kv.req_pool_idx) and self.begin(
                request, state, sealed_len, live_positions, ahead
            )
            return looked, self.arrived(kv.req_pool_idx, kv)
        except PolicyError as error:
            if self._end is None:
                raise
            state.failed = True
            self.failed += 1
            self._end(request, error)
            return False, None

    def begin(
        self,
        request: Any,
        state: Looked,
        sealed_len: int,
        live_positions: Callable[[Any, Any], NDArray[np.int64]],
        ahead: Ahead = Ahead.NEVER,
    ) -> bool:
        """EvictionPlan for evicted of a request (SGLang's `Req`) if it is time to; whether it was.

        Args:
            state: its options, and when it was last looked at (changed here).
            sealed_len: positions from here on may not die.
            live_positions: (state, record) -> positions that count as alive, ascending.
            ahead: whether to wait for the interval.

        Raises:
            PolicyError: the policy raised an error, or its scores have a wrong shape or dtype.
        """
        kv = request.kv
        self._observer.keep_seeds(request)
        early = ahead.due(state.options, kv.kv_committed_len - state.last_len, self._page_size)
        if not early and not due(state.options, state.last_len, kv.kv_committed_len):
            return False
        policy = load_policy(state.options.policy, state.options.policy_args)
        if not self._observer.ready(kv.req_pool_idx, policy):
            return False
        state.last_len = kv.kv_committed_len
        look = plan_eviction(
            live_positions(state, kv),
            logical_len=kv.kv_committed_len,
            options=state.options,
            eligible_below=sealed_len,
        )
        if look is not None:
            self.start(kv.req_pool_idx, kv, policy, look)
        return True

    def start(self, row: int, record: object, policy: Policy, look: EvictionPlan) -> None:
        """Decide the evicted of a look; `arrived` gives them, at once off CUDA.

        `record`: identity of the request, compared with `is`.

        Raises:
            PolicyError: see `begin`.
        """
        assert row not in self._pending, f"row {row} was looked at twice"
        needs_device = policy.reads_keys or policy.observation() is not None

        def choose() -> torch.Tensor:
            view = look.view(self._device if needs_device else None)
            if needs_device:
                view = self._observer.see(row, policy, view)
            return select_on_device(policy, view, look)

        work = self._work if needs_device else WorkAtOnce()
        self._pending[row] = _Pending(policy, record, work.start(choose))

    def waiting(self, row: int) -> bool:
        """Whether a look of this row is on its way."""
        return row in self._pending

    def arrived(self, row: int, record: object) -> NDArray[np.int64] | None:
        """Evicted tokens of the row's look, ascending, once; None if none has come. A look of
        another request that had the row before is dropped.

        Raises:
            PolicyError: a score was not finite.
        """
        pending = self._pending.get(row)
        if pending is None or not pending.found.ready():
            return None
        del self._pending[row]
        if pending.record is not record:
            return None
        return check_selected(pending.policy, pending.found.take())

    def wait(self) -> None:
        """Block until every look has ended: the pool is short, and nothing else can be done."""
        for pending in self._pending.values():
            pending.found.wait()

    def forget(self, row: int) -> None:
        """The row went back to the pool."""
        self._pending.pop(row, None)
