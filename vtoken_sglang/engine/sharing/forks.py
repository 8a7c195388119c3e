"""Copy-on-write of radix prefixes on the engine's side: what is forked, and moving the lock."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vtoken_sglang.core.fork import ForkCase, ForkDecision, decide_fork
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.types import Int64Array
from vtoken_sglang.engine.request_state import ForkRecord, RequestState
from vtoken_sglang.engine.sharing.holders import PageHolders
from vtoken_sglang.errors import InvariantError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

LOGGED_FORKS: Final = 256


class PrefixForks:
    """Decides and carries out forks. Scheduler thread only.

    Fields:
        holders: who holds each tree page. records: the last forks that were started.
        committed: forks whose row was switched. decisions: by strategy and reason.
    """

    def __init__(self, scheduler: Scheduler, reclaimer: Reclaimer) -> None:
        self._scheduler = scheduler
        self._reclaimer = reclaimer
        allocator = scheduler.token_to_kv_pool_allocator
        self._page_size: int = allocator.page_size
        rows = scheduler.req_to_token_pool.req_to_token
        pages = scheduler.max_total_num_tokens // self._page_size
        self.holders = PageHolders(rows, self._page_size, pages)
        self.records: deque[ForkRecord] = deque(maxlen=LOGGED_FORKS)
        self.committed = 0
        self.decisions: Counter[str] = Counter()

    def consider(self, state: RequestState, *, free_pages: int, pressure: bool) -> None:
        """Fork the request's prefix if its strategy says so; `holders` must be up to date.

        `auto` asks the cost rule, and before its first fork gives requests that wait a chance to
        share; `cow` forks the whole prefix as soon as a token of it was evicted and the pool has
        the pages. One fork of a request is in flight at a time.
        """
        table, strategy = state.table, state.options.shared
        if table is None or not table.protected_len or state.fork is not None:
            return
        case = self._case(state, free_pages, pressure)
        decision = decide_fork(case) if strategy == "auto" else _fork_all(case)
        self.decisions[f"{strategy}: {decision.reason}"] += 1
        state.fork_wanted = decision.wanted_pages or None
        first, state.fork_considered = not state.fork_considered, True
        if decision.first_page == len(case.live):
            return
        if first and strategy == "auto" and not pressure and self._scheduler.waiting_queue:
            # Its prompt has just come into the tree. Those that wait are asked right after this
            # safe point and may share it; then a copy would release nothing.
            state.fork_wanted = decision.cost_pages
            return
        self._start(state, decision)

    def _case(self, state: RequestState, free_pages: int, pressure: bool) -> ForkCase:
        table, pages = state.table, state.tree_pages
        assert table is not None
        assert pages is not None
        assert len(pages) * self._page_size == table.protected_len
        live = table.tree_owned_live_positions(0)
        return ForkCase(
            live=np.bincount(live // self._page_size, minlength=len(pages)),
            holders=self.holders.total[pages].astype(np.int64),
            pruning_holders=self.holders.pruning[pages].astype(np.int64),
            page_size=self._page_size,
            free_pages=free_pages,
            reserve_pages=len(self._scheduler.running_batch.reqs),
            pressure=pressure,
            remaining=_remaining(state.request),
            starts=self._node_starts(state.request, len(pages)),
        )

    def _start(self, state: RequestState, decision: ForkDecision) -> None:
        plan = self._reclaimer.fork(state.row, decision.first_page * self._page_size)
        if plan is None:
            return
        state.fork = ForkRecord(
            rid=state.request.rid,
            reason=decision.reason,
            tokens=len(plan.positions),
            predicted_pages=decision.gain_pages,
            taken_pages=len(plan.dst_pages),
        )
        self.records.append(state.fork)

    def move_lock(self, state: RequestState, new_protected_len: int) -> None:
        """A fork was committed: lock only what the row still shares, all in this safe point.

        The new lock is taken before the old one goes, so that the shared part is never evictable.
        The forked part stays in the tree, exact, and may go when memory is short.
        """
        record, state.fork = state.fork, None
        assert record is not None, f"row {state.row}: a fork was committed that nobody started"
        request, tree = state.request, self._scheduler.tree_cache
        evictable = tree.evictable_size()
        lock = None
        if new_protected_len:
            lock = tree.lock(self._node_at(request, new_protected_len))
        tree.unlock(request.lock)
        request.lock = lock
        state.record.cache_protected_len = new_protected_len
        self.holders.cut(state, new_protected_len // self._page_size)
        released = (tree.evictable_size() - evictable) // self._page_size
        record.realised_pages = released - record.taken_pages
        self.committed += 1

    def describe(self) -> dict[str, Any]:
        """Counters for `/server_info`: forks that were committed, every decision by strategy and
        reason, and the last forks with predicted and realised pages."""
        return {
            "committed": self.committed,
            "decisions": dict(self.decisions),
            "log": [asdict(record) for record in self.records],
        }

    def _path(self, request: Req) -> Any:
        """Nodes of the request's locked path, root first."""
        (path,) = self._scheduler.tree_cache.tree_core.collect_path_info([request.lock.node])
        return path

    def _node_starts(self, request: Req, pages: int) -> Int64Array:
        """Pages below `pages` at which a node of the locked path starts, ascending; 0 is one."""
        ends = [node.path_end // self._page_size for node in self._path(request)]
        return np.array(sorted({0, *(end for end in ends if end < pages)}), np.int64)

    def _node_at(self, request: Req, length: int) -> Any:
        """The tree node that ends at `length` of the request's locked path.

        There is one: the fork was started at a node's end, and a locked node may be split further
        but never goes. Finding it by a match would make the path the most recently used.
        """
        for node in self._path(request):
            if node.path_end == length:
                return node.node_id
        raise InvariantError(f"request {request.rid}: no node of its prefix ends at {length}")


def _fork_all(case: ForkCase) -> ForkDecision:
    """Strategy `cow`: the whole prefix, whatever others hold, once a token of it was evicted."""
    moved = int(case.live.sum())
    cost = -(-moved // case.page_size)
    holes = moved < len(case.live) * case.page_size
    fits = cost <= max(0, case.free_pages - case.reserve_pages)
    return ForkDecision(
        first_page=0 if holes and fits else len(case.live),
        cost_pages=cost,
        released_pages=float((case.holders == 1).sum()),
        moved_tokens=moved,
        reason="pays" if holes and fits else "no headroom" if holes else "nothing evicted",
        wanted_pages=cost if holes and not fits else 0,
    )


def _remaining(request: Req) -> int:
    """Tokens the request may still generate."""
    limit = request.sampling_params.max_new_tokens
    return max(0, int(limit) - len(request.output_ids)) if limit is not None else 1 << 30
