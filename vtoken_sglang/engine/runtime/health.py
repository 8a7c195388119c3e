"""Whether every page of the pool has exactly one owner: at each step with `--vtoken-check`, and
when the server goes idle."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import numpy as np

from vtoken_sglang.core.footprint import page_ceil
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.types import Int64Array
from vtoken_sglang.engine.request_state import RequestState
from vtoken_sglang.engine.runtime.page_pool import AllocatorPagePool
from vtoken_sglang.engine.sharing.forks import PrefixForks
from vtoken_sglang.errors import InvariantError

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


class Health:
    """Checks of one scheduler's memory. Scheduler thread only.

    Args:
        check: everything at every step (`--vtoken-check`); otherwise counts only, when idle.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: AllocatorPagePool,
        reclaimer: Reclaimer,
        forks: PrefixForks,
        check: bool,
    ) -> None:
        self._scheduler, self._pool = scheduler, pool
        self._reclaimer, self._forks, self._check = reclaimer, forks, check
        self._idle = False

    def busy(self) -> None:
        """Some request has a row: the next idle phase is a new one."""
        self._idle = False

    def after_step(self, states: Collection[RequestState]) -> None:
        """A safe point did something. Raises InvariantError with every violation, if asked to."""
        if self._check:
            self._require(self.violations(states))

    def idle(self, states: Collection[RequestState]) -> None:
        """Nothing of a request may be left. Once per idle phase: SGLang's loop comes here many
        times a second. Raises InvariantError."""
        if self._idle:
            return
        self._idle = True
        held, rows = self._reclaimer.held_pages(), sorted(state.row for state in states)
        if held or rows:
            raise InvariantError(f"idle, but {held} held pages and state of rows {rows} are left")
        if self._check:
            self._require(self.violations(states))

    def violations(self, states: Collection[RequestState]) -> list[str]:
        """What is wrong, as strings; empty is healthy. Reads the free list, the tree and every row.

        `states`: of every request with a row.
        """
        found = self._reclaimer.violations(
            self._pool.free_page_ids(),
            other_pages=np.concatenate([self._tree_pages(), *map(self._private_pages, states)]),
            total_pages=self._pool.total_pages,
        )
        return found + self._forks.holders.violations(states)

    def _tree_pages(self) -> Int64Array:
        """Every page of the radix tree, locked or not."""
        tree = self._scheduler.tree_cache
        if tree is None:
            return np.empty(0, np.int64)
        return self._pages_of(tree.all_values_flatten().cpu().numpy())

    def _private_pages(self, state: RequestState) -> Int64Array:
        """Pages of a row that neither the tree nor a ledger knows: all above the tree's while
        nothing was evicted, afterwards those opened since the ledger caught up."""
        if state.released:
            return np.empty(0, np.int64)
        record, size = state.record, self._pool.page_size
        known = record.cache_protected_len if state.table is None else state.table.logical_len
        row = self._scheduler.req_to_token_pool.req_to_token[state.row]
        pages = row[page_ceil(known, size) : record.kv_allocated_len : size]
        return self._pages_of(pages.cpu().numpy())

    def _pages_of(self, slots: Int64Array) -> Int64Array:
        return np.unique(slots.astype(np.int64) // self._pool.page_size)

    @staticmethod
    def _require(violations: Iterable[str]) -> None:
        if text := "; ".join(violations):
            raise InvariantError(text)
