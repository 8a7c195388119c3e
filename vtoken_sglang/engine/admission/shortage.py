"""What is done when the pool is short, before SGLang retracts a request.

    empty pages go back     at every safe point, without asking
    eviction ahead of time  when less than a page per running request is left
    copy-on-write           with it, where the cost rule finds that it pays under pressure
    the radix tree          SGLang evicts what nobody holds, as for any allocation
    retraction              requests lose all they hold, and are computed again from the start

What the tree holds for nobody counts as free throughout: a warm server's free list is empty, and
evicting ahead of time for every page that it gives up would make the interval meaningless. Requests
are evicted from ahead of time before the last of it is gone, not before the first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from vtoken_sglang.core.types import PagePool
from vtoken_sglang.engine.admission.demand import Demand
from vtoken_sglang.engine.statistics import Statistics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

# Rounds of eviction, copy and commit before one decode step; the first frees empty pages, the
# second what its copies emptied.
MAX_ROUNDS = 3
# Passes in which a chunk finds no room while nothing else runs, before its request is given up.
MAX_IDLE_PASSES = 64
# Below this share of free pages the pool is under pressure.
PRESSURE_FREE_SHARE = 1 / 8


class ShortageRelief:
    """Makes room before a decode step. Scheduler thread only.

    `work(batch)` evicts from the requests of a batch ahead of time, reclaims, and waits for copies.
    `settle()` only waits for copies. That is done, and a chunk without room retracted, when not
    `enabled`, too: SGLang knows of neither, and would end the last request for want of their pages.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        demand: Demand,
        pool: PagePool,
        statistics: Statistics,
        work: Callable[[ScheduleBatch], None],
        settle: Callable[[], None],
        enabled: bool,
    ) -> None:
        self._scheduler, self._demand, self._pool = scheduler, demand, pool
        self._statistics, self._work, self._settle = statistics, work, settle
        self._enabled = enabled
        self._idle_passes = 0
        self._gained_pages = 0

    def under_pressure(self) -> bool:
        """Whether repacks and forks should happen below their triggers, too."""
        total = self._scheduler.max_total_num_tokens
        return not self._has(math.ceil(total * PRESSURE_FREE_SHARE))

    def wanted(self, running: int) -> bool:
        """Whether requests should be evicted from ahead of time in this safe point, when `running`
        of them may each open a page in the step that follows."""
        return self._enabled and (self._stalled or self._pool.free_pages() < running)

    def gained(self, pages: int | None) -> None:
        """Pages that the last safe point returned, evicting ahead of time; None if it did not."""
        self._gained_pages = 0 if pages is None else self._gained_pages + max(0, pages)

    def before_decode(self, batch: ScheduleBatch) -> None:
        """Entry of `Scheduler.update_running_batch`, which retracts when the step does not fit.

        Nothing was allocated since the safe point, and no forward was launched: rows may still
        change. Requests whose last token is in flight free their pages without us.
        """
        if self._scheduler._reqs_finishing_inflight(batch):
            return
        need = batch.new_tokens_required_next_decode()
        if not self._enabled:
            if not self._has(need):
                self._settle()
            if not self._has(need):
                self._retracted_chunk()
            return
        if self._has(need):
            held_back = self._gained_pages * self._pool.page_size
            self._statistics.retractions_avoided += bool(need) and not self._has(need + held_back)
            return
        for _ in range(MAX_ROUNDS):
            self._work(batch)
            if self._has(need):
                self._statistics.retractions_avoided += 1
                return
        if self._retracted_chunk() and self._has(need):
            self._statistics.retractions_avoided += 1

    @property
    def _stalled(self) -> bool:
        # The chunked request may have been aborted since it found no room.
        return self._demand.stalled and self._scheduler.chunked_req is not None

    def _has(self, tokens: int) -> bool:
        return self._pool.free_pages() * self._pool.page_size >= tokens

    def _retracted_chunk(self) -> bool:
        """Retract a chunked request that found no room: it holds pages and cannot go on, while the
        others can. Only when no chunk of it is in flight."""
        request = self._scheduler.chunked_req
        if not self._stalled or request.inflight_middle_chunks:
            return False
        from sglang.srt.managers.schedule_batch import release_req

        scheduler = self._scheduler
        release_req(
            req=request,
            remaing_req_count=0,
            req_to_token_pool=scheduler.req_to_token_pool,
            token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
            tree_cache=scheduler.tree_cache,
            hisparse_coordinator=None,
        )
        scheduler.chunked_req = None
        self._demand.stalled = False
        scheduler._add_request_to_queue(request, is_retracted=True)
        return True

    def watch(self, running: int) -> None:
        """A chunk that finds no room while nothing else runs waits in vain: end its request."""
        request = self._scheduler.chunked_req
        if not self._stalled or running:
            self._idle_passes = 0
            return
        self._idle_passes += 1
        if self._idle_passes < MAX_IDLE_PASSES:
            return
        from sglang.srt.managers.io_struct import AbortReq

        logger.error(
            "request %s was ended: the pool holds %d tokens and its next chunk found no room in "
            "them, though nothing else ran",
            request.rid,
            self._demand.tokens,
        )
        self._idle_passes = 0
        self._scheduler.abort_request(AbortReq(rid=request.rid))
