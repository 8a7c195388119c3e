"""Copy-on-write of radix prefixes on the engine's side: who holds a page, and moving the lock.

Tree pages are known here by their page id: a page of the tree exists once, and every request whose
lock covers it has it in its row. That works for both of SGLang's tree cores; the Rust one shows no
lock counts. A pruned row may have a hole at a page start, so its page ids are kept from the moment
before its first eviction.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken_sglang.core.fork import ForkCase, ForkDecision, decide_fork
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.types import Row
from vtoken_sglang.errors import InvariantError

LOGGED_FORKS = 256


@dataclass(slots=True)
class ForkRecord:
    """One fork that was started, for the log.

    Fields:
        rid: the request. reason: what decided. tokens: live tokens copied.
        predicted_pages: pages saved by the rule's count.
        realised_pages: pages that became evictable when the lock moved, less pages taken; None
            until then, and for a fork that was given up.
    """

    rid: str
    reason: str
    tokens: int
    predicted_pages: float
    taken_pages: int
    realised_pages: int | None = None


class PrefixForks:
    """Decides and carries out forks. Scheduler thread only."""

    def __init__(self, scheduler: Any, reclaimer: Reclaimer) -> None:
        self._scheduler = scheduler
        self._reclaimer = reclaimer
        self._page_size: int = scheduler.token_to_kv_pool_allocator.page_size
        self._rows: torch.Tensor = scheduler.req_to_token_pool.req_to_token
        self._pages: dict[int, NDArray[np.int64]] = {}  # by row: tree pages of pruned requests
        # By row, of requests not pruned yet: record, tree-owned length, tree pages.
        self._unpruned: dict[int, tuple[Any, int, NDArray[np.int64]]] = {}
        self._requests: dict[int, Any] = {}  # by row: requests with a fork in flight
        self._started: dict[int, ForkRecord] = {}
        self.records: deque[ForkRecord] = deque(maxlen=LOGGED_FORKS)
        self.committed = 0
        self.decisions: Counter[str] = Counter()
        # By row: pages of a fork that would pay, had the pool as many.
        self.waiting: dict[int, int] = {}
        self._asked: set[int] = set()  # rows whose fork was considered before

    def adopt(self, request: Any) -> None:
        """Keep the row's tree pages; call before its first eviction."""
        self._pages[request.kv.req_pool_idx] = self._read_pages(request.kv)
        self._unpruned.pop(request.kv.req_pool_idx, None)

    def forget(self, row: int) -> None:
        """The row ended."""
        self._pages.pop(row, None)
        self._unpruned.pop(row, None)
        self._requests.pop(row, None)
        self._started.pop(row, None)
        self.waiting.pop(row, None)
        self._asked.discard(row)

    def consider_all(
        self,
        requests: Iterable[tuple[Any, str]],
        holders: PageHolders,
        free_pages: Callable[[], int],
        pressure: bool,
    ) -> None:
        """`consider` (request, strategy) one after the other: each takes pages."""
        for request, strategy in requests:
            self.consider(request, strategy, holders, free_pages=free_pages(), pressure=pressure)

    def consider(
        self, request: Any, strategy: str, holders: PageHolders, *, free_pages: int, pressure: bool
    ) -> None:
        """Fork the request's prefix if its strategy says so.

        `auto` asks the cost rule, and before its first fork gives requests that wait a chance to
        share; `cow` forks the whole prefix as soon as a token of it is dead and the pool has the
        pages. One fork of a row is in flight at a time.
        """
        row = Row(request.kv.req_pool_idx)
        table = self._reclaimer.table(row)
        if table is None or not table.protected_len or row in self._requests:
            return
        pages = self._pages[row][: table.protected_len // self._page_size]
        live = table.tree_owned_live_positions(0)
        case = ForkCase(
            live=np.bincount(live // self._page_size, minlength=len(pages)),
            holders=holders.all_of(pages),
            pruning_holders=holders.pruning_of(pages),
            page_size=self._page_size,
            free_pages=free_pages,
            reserve_pages=len(self._scheduler.running_batch.reqs),
            pressure=pressure,
            remaining=_remaining(request),
            starts=self._node_starts(request, len(pages)),
        )
        decision = decide_fork(case) if strategy == "auto" else _fork_all(case)
        self.decisions[f"{strategy}: {decision.reason}"] += 1
        self.waiting.pop(row, None)
        if decision.wanted_pages:
            self.waiting[row] = decision.wanted_pages
        first = row not in self._asked
        self._asked.add(row)
        if decision.first_page == len(pages):
            return
        if first and strategy == "auto" and not pressure and self._scheduler.waiting_queue:
            # Its prompt has just come into the tree. Those that wait are asked right after this
            # safe point and may share it; then a copy would release nothing.
            self.waiting[row] = decision.cost_pages
            return
        self._start(request, row, decision)

    def _start(self, request: Any, row: Row, decision: ForkDecision) -> None:
        plan = self._reclaimer.fork(row, decision.first_page * self._page_size)
        if plan is None:
            return
        record = ForkRecord(
            rid=request.rid,
            reason=decision.reason,
            tokens=len(plan.positions),
            predicted_pages=decision.gain_pages,
            taken_pages=len(plan.dst_pages),
        )
        self.records.append(record)
        self._requests[row] = request
        self._started[row] = record

    def give_up(self, row: Row) -> None:
        """The row's fork was not committed: the request may try again."""
        del self._requests[row], self._started[row]

    def move_lock(self, row: Row, new_protected_len: int) -> None:
        """A fork was committed: lock only what the row still shares, all in this safe point.

        The new lock is taken before the old one goes, so that the shared part is never evictable.
        The forked part stays in the tree, exact, and may go when memory is short.
        """
        request = self._requests.pop(row)
        record = self._started.pop(row)
        tree = self._scheduler.tree_cache
        evictable = tree.evictable_size()
        lock = None
        if new_protected_len:
            lock = tree.lock(self._node_at(request, new_protected_len))
        tree.unlock(request.lock)
        request.lock = lock
        request.kv.cache_protected_len = new_protected_len
        self._pages[row] = self._pages[row][: new_protected_len // self._page_size]
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

    def _path(self, request: Any) -> Any:
        """Nodes of the request's locked path, root first."""
        (path,) = self._scheduler.tree_cache.tree_core.collect_path_info([request.lock.node])
        return path

    def _node_starts(self, request: Any, pages: int) -> NDArray[np.int64]:
        """Pages below `pages` at which a node of the locked path starts, ascending; 0 is one."""
        ends = [node.path_end // self._page_size for node in self._path(request)]
        return np.array(sorted({0, *(end for end in ends if end < pages)}), np.int64)

    def _node_at(self, request: Any, length: int) -> Any:
        """The tree node that ends at `length` of the request's locked path.

        There is one: the fork was started at a node's end, and a locked node may be split further
        but never goes. Finding it by a match would make the path the most recently used.
        """
        for node in self._path(request):
            if node.path_end == length:
                return node.node_id
        raise InvariantError(f"request {request.rid}: no node of its prefix ends at {length}")

    def holders(self, requests: Iterable[Any], pruning_rows: set[int]) -> PageHolders:
        """Count who holds each tree page now."""
        held: list[NDArray[np.int64]] = []
        pruning: list[NDArray[np.int64]] = []
        for request in requests:
            kv = request.kv
            if not kv.cache_protected_len:
                continue
            pages = self._pages_of(kv)
            held.append(pages)
            if kv.req_pool_idx in pruning_rows:
                pruning.append(pages)
        return PageHolders.of(held, pruning)

    def _read_pages(self, kv: Any) -> NDArray[np.int64]:
        entries = self._rows[kv.req_pool_idx, : kv.cache_protected_len : self._page_size]
        pages: NDArray[np.int64] = entries.cpu().numpy().astype(np.int64) // self._page_size
        return pages

    def _pages_of(self, kv: Any) -> NDArray[np.int64]:
        """Tree pages of a row, read from the device once per length: without a eviction they stay
        what they are until the tree takes over more of the prompt."""
        row, length = kv.req_pool_idx, kv.cache_protected_len
        if (pages := self._pages.get(row)) is not None:
            return pages
        known = self._unpruned.get(row)
        if known is None or known[0] is not kv or known[1] != length:
            known = self._unpruned[row] = (kv, length, self._read_pages(kv))
        return known[2]


@dataclass(frozen=True, slots=True)
class PageHolders:
    """Running requests whose lock covers a page. Its size is that of the pages held.

    Fields:
        pages: int64 [n], ids of the pages that somebody holds, ascending.
        total, pruning: int64 [n], who holds each; of those, requests that prune and may fork.
    """

    pages: NDArray[np.int64]
    total: NDArray[np.int64]
    pruning: NDArray[np.int64]

    @classmethod
    def of(cls, held: list[NDArray[np.int64]], pruning: list[NDArray[np.int64]]) -> PageHolders:
        """From the pages of every holder, and of every holder that may fork."""
        none = np.zeros(0, np.int64)
        pages, total = np.unique(np.concatenate([none, *held]), return_counts=True)
        at = np.searchsorted(pages, np.concatenate([none, *pruning]))
        return cls(pages, total, np.bincount(at, minlength=len(pages)))

    def all_of(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Holders of these pages; every one has at least the asking request."""
        return np.maximum(self._found(self.total, pages), 1)

    def pruning_of(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """Holders of these pages that may fork."""
        return self._found(self.pruning, pages)

    def _found(self, counts: NDArray[np.int64], pages: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(self.pages):
            return np.zeros(len(pages), np.int64)
        at = np.minimum(np.searchsorted(self.pages, pages), len(self.pages) - 1)
        return np.where(self.pages[at] == pages, counts[at], 0)


def _fork_all(case: ForkCase) -> ForkDecision:
    """Strategy `cow`: the whole prefix, whatever others hold, once a token of it is dead."""
    moved = int(case.live.sum())
    cost = -(-moved // case.page_size)
    dead = moved < len(case.live) * case.page_size
    fits = cost <= max(0, case.free_pages - case.reserve_pages)
    return ForkDecision(
        first_page=0 if dead and fits else len(case.live),
        cost_pages=cost,
        released_pages=float((case.holders == 1).sum()),
        moved_tokens=moved,
        reason="pays" if dead and fits else "no headroom" if dead else "nothing dead",
        wanted_pages=cost if dead and not fits else 0,
    )


def _remaining(request: Any) -> int:
    """Tokens the request may still generate."""
    limit = request.sampling_params.max_new_tokens
    return max(0, int(limit) - len(request.output_ids)) if limit is not None else 1 << 30
