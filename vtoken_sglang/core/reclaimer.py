"""The reclaimer: per-token evictions in, free pages out. Drives table, planner, copies and commits.

    glue (scheduler thread, between two forwards)
      open / sync_new_tokens / evict_tokens      liveness only, nothing moves
      step                                       1 commit finished copies   2 free empty pages
                                                 3 plan and submit repacks
      close / cancel                             a request ends / keeps its pages where they are

Who owns a page of a pruned request, at any time exactly one of:
  * its table's ledger (sources of a pending repack included),
  * a pending repack, as destination, until the commit,
  * an orphaned copy: its plan was given up, its fence has not passed,
  * the pool.

All of this changes in the scheduler thread only. The copy itself runs elsewhere and touches
nothing but K/V rows nobody else writes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vtoken_sglang.core.commit import Identity
from vtoken_sglang.core.copies import CopiesInFlight
from vtoken_sglang.core.copy_engine import CopyEngine
from vtoken_sglang.core.faults import PositionError
from vtoken_sglang.core.invariants import Holdings, find_violations
from vtoken_sglang.core.page_reads import PageReads
from vtoken_sglang.core.plan import RepackPlan, StepReport
from vtoken_sglang.core.pool import PagePool
from vtoken_sglang.core.repack import make_fork, make_plans
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.settings import ReclaimSettings
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Generation, Int32Array, Int64Array, IntArray, Row
from vtoken_sglang.errors import InvariantError


class Reclaimer:
    """Token tables of all pruned requests, and the pages their evictions set free.

    Fields:
        evicted_counts: int32 [num_rows], host: dead positions per row, 0 for rows without a table.
            Live length of a row = logical length - evicted_counts[row]. Read only.
        copies: copies in flight; `copies.corrupt_copies` counts those with wrong bytes.
    """

    def __init__(
        self,
        *,
        rows: torch.Tensor,
        buffers: Sequence[torch.Tensor],
        pool: PagePool,
        copier: CopyEngine,
        settings: ReclaimSettings,
        identity: Identity | None = None,
    ) -> None:
        """`rows`: int32 [num_rows, width], the engine's req_to_token. `buffers`: K and V of every
        layer, [num_slots, heads, dim]. `identity`: the engine's (generation, record) of a row now;
        asked again before every commit."""
        self._rows = RequestRows(rows)
        self._page_reads = PageReads(self._rows)
        self._pool = pool
        self._settings = settings
        self._tables: dict[Row, TokenTable] = {}
        self.evicted_counts: Int32Array = np.zeros(len(self._rows), np.int32)
        self.copies = CopiesInFlight(
            rows=self._rows,
            buffers=list(buffers),
            copier=copier,
            check=settings.check,
            identity=identity,
        )

    # -- requests -------------------------------------------------------------------------------

    def open(
        self, row: Row, generation: Generation, record: object, protected_len: int, logical_len: int
    ) -> TokenTable:
        """Start a table at the first eviction of a request; from now on its ledger, not the row,
        says what it must give back.

        `record`: opaque identity of the request, compared with `is`. `protected_len`: tree-owned
        positions, page multiple. `logical_len`: positions with a slot. Reads the row once. Raises
        InvariantError if the row still has a table (its request was never closed) or a private
        page start is dead.
        """
        if row in self._tables:
            raise InvariantError(f"row {row}: opened again before it was closed")
        size = self._pool.page_size
        pages = self._rows.read(row, protected_len, logical_len, size) // size
        if len(pages) and int(pages.min()) < 1:
            raise InvariantError(
                f"row {row}: a private page start is dead before the first eviction"
            )
        table = TokenTable(
            row=row,
            generation=generation,
            record=record,
            page_size=size,
            protected_len=protected_len,
            logical_len=logical_len,
            pages=pages,
        )
        self._tables[row] = table
        return table

    def table(self, row: Row) -> TokenTable | None:
        """The row's table, or None if nothing of its request was ever evicted."""
        return self._tables.get(row)

    def is_dense(self, row: int) -> bool:
        """Whether a row's live tokens fill whole pages in order (see TokenTable); rows without a
        table do, as the engine allocates them."""
        return (table := self._tables.get(Row(row))) is None or table.is_dense()

    def sync_new_tokens(self, row: Row, logical_len: int) -> None:
        """Positions up to `logical_len` were appended by the engine (see TokenTable)."""
        self._tables[row].sync_new_tokens(logical_len)

    def evict_tokens(self, row: Row, positions: IntArray | Sequence[int]) -> int:
        """Mark tokens of a row dead: count them and zero their row entries. Returns how many were
        alive until now. Raises PositionError (see TokenTable.evict_tokens), having changed
        nothing."""
        table = self._tables[row]
        if table.ledger.has_unread and len(positions):
            # Before a eviction can zero the start of one of them.
            self._page_reads.need(table, int(np.max(positions)), self._tables.values())
        died = table.evict_tokens(positions)
        if len(died):
            self._rows.zero(row, died)
            self.evicted_counts[row] = table.evicted
        return len(died)

    def cancel(self, row: Row) -> None:
        """Give up the row's pending repack, if any; the row keeps living where it is. The
        destinations stay held until the copy's fence has passed."""
        self.copies.cancel(row, self._tables.get(row))

    def close(self, row: Row) -> Int64Array:
        """The request ends (finish, abort, retract). Returns every private page it holds, the tail
        included, for the caller to free; sync_new_tokens must have seen all allocated positions.
        A pending copy is abandoned: its destinations are released by a later step or drain, once
        its fence has passed. Unknown rows return no pages."""
        self.cancel(row)
        table = self._tables.get(row)
        if table is None:
            return np.zeros(0, np.int64)
        if table.ledger.has_unread:
            self._page_reads.need(table, table.logical_len, self._tables.values())
        del self._tables[row]
        self.evicted_counts[row] = 0
        return table.ledger.page[table.ledger.held_codes()].astype(np.int64)

    def private_pages(self, row: Row) -> int:
        """Pages the row's ledger holds plus destinations held for it; 0 without a table."""
        table, copy = self._tables.get(row), self.copies.pending.get(row)
        held = table.ledger.pages_held if table is not None else 0
        return held + (len(copy.plan.dst_pages) if copy is not None else 0)

    def held_pages(self) -> int:
        """Destination pages held by pending or orphaned copies."""
        return self.copies.held_pages()

    def metadata_bytes(self) -> int:
        """Host bytes of all tables and pending plans."""
        plans = [copy.plan for copy in self.copies.pending.values()]
        tables = sum(table.metadata_bytes() for table in self._tables.values())
        return tables + sum(plan.metadata_bytes() for plan in plans)

    # -- the safe point -------------------------------------------------------------------------

    def step(
        self, *, sealed_upto: Mapping[Row, int], pressure: bool = False, reserve_pages: int = 0
    ) -> StepReport:
        """One safe point.

        Args:
            sealed_upto: per row that may be worked on, the position below which every token is
                written and no forward in flight writes: page_floor(committed - in flight). Rows
                left out (finished, chunk in flight) are only committed, never planned or freed.
            pressure: the pool is short; repack below the trigger too.
            reserve_pages: free pages that destinations must leave for the engine.

        Raises CopyFailedError after everything else of the step is done, if a copy failed.
        """
        done = self.copies.settle(self._tables)
        dead: list[Int64Array] = []
        eligible: list[TokenTable] = []
        repackable = self._pool.page_size > 1
        if self._settings.reclaim:
            for row, upto in sealed_upto.items():
                table = self._tables.get(row)
                if table is None:
                    continue
                table.seal(upto)
                if table.ledger.has_empty and len(pages := table.ledger.take_empty()):
                    dead.append(pages)
                if repackable and row not in self.copies.pending:
                    eligible.append(table)
        self._release([*done.source_pages, *done.orphan_pages, *dead])
        plans = self._repack(eligible, pressure, reserve_pages) if eligible else []
        self._page_reads.ask(self._tables.values())
        if done.failures:
            raise done.failures[0]
        return StepReport(
            committed=done.committed,
            dropped=done.dropped,
            moved_tokens=done.moved_tokens,
            freed_empty_pages=sum(map(len, dead)),
            freed_source_pages=sum(map(len, done.source_pages)),
            submitted=len(plans),
            submitted_tokens=sum(len(plan.positions) for plan in plans),
            taken_pages=sum(len(plan.dst_pages) for plan in plans),
            pending=len(self.copies.pending),
            held_pages=self.copies.held_pages() if self.copies.busy else 0,
            forked=tuple(done.forked),
        )

    def fork(self, row: Row, new_protected_len: int) -> RepackPlan | None:
        """Start a copy-on-write fork: the row's live tokens of [new_protected_len, protected_len)
        are copied out of the tree's pages, and a later step commits the row to the copies.

        Returns the plan that was submitted; None if the row has a copy in flight or the pool has
        too few pages. Raises PositionError unless `new_protected_len` is a page multiple below the
        row's tree-owned length.
        """
        table = self._tables[row]
        if new_protected_len % table.page_size or not 0 <= new_protected_len < table.protected_len:
            rule = f"a page multiple below the tree-owned length {table.protected_len}"
            raise PositionError("new_protected_len", rule, new_protected_len)
        if row in self.copies.pending:
            return None
        plan = make_fork(table, self._rows, self._pool, new_protected_len)
        if plan is None:
            return None
        self._submit([plan])
        return plan

    def settle(self, timeout: float) -> StepReport:
        """Wait up to `timeout` seconds for all copies, then commit or release everything, now.
        Raises CopyFailedError after that, if a copy failed."""
        self.copies.wait(timeout)
        done = self.copies.settle(self._tables)
        self._release([*done.source_pages, *done.orphan_pages])
        if done.failures:
            raise done.failures[0]
        return StepReport(
            committed=done.committed,
            dropped=done.dropped,
            moved_tokens=done.moved_tokens,
            freed_source_pages=sum(map(len, done.source_pages)),
            pending=len(self.copies.pending),
            held_pages=self.copies.held_pages(),
            forked=tuple(done.forked),
        )

    def drain(self, timeout: float) -> bool:
        """`settle`; whether nothing is held afterwards."""
        self.settle(timeout)
        return not self.copies.busy

    def _release(self, pages: list[Int64Array]) -> None:
        if pages:
            self._pool.release(np.concatenate(pages))

    def _repack(
        self, eligible: list[TokenTable], pressure: bool, reserve_pages: int
    ) -> list[RepackPlan]:
        plans = make_plans(eligible, self._pool, self._settings, pressure, reserve_pages)
        if plans:
            self._submit(plans)
        return plans

    def _submit(self, plans: list[RepackPlan]) -> None:
        try:
            self.copies.submit(plans, self._tables)
        except BaseException:
            self._pool.release(np.concatenate([plan.dst_pages for plan in plans]))
            raise

    # -- checks ---------------------------------------------------------------------------------

    def violations(
        self,
        free_pages: Int64Array | None = None,
        *,
        other_pages: Int64Array | None = None,
        total_pages: int | None = None,
    ) -> list[str]:
        """What is wrong, as strings; empty is healthy. Reads every open row: for tests, idle and
        `--vtoken-check`.

        Args:
            free_pages: int64, the pool's free page ids; none may be held, none twice.
            other_pages: int64, pages owned by the tree or by rows without a table.
            total_pages: allocatable pages, ids 1..total_pages; with the other two given, every
                page must be somewhere.
        """
        for table in self._tables.values():
            if table.ledger.has_unread:
                self._page_reads.need(table, table.logical_len, self._tables.values())
        holdings = Holdings(
            tables=list(self._tables.values()),
            pending=[copy.plan for copy in self.copies.pending.values()],
            orphans=[pages for pages, _ in self.copies.orphans],
            evicted_counts=self.evicted_counts,
        )
        found = find_violations(
            holdings, self._rows, free_pages, other_pages=other_pages, total_pages=total_pages
        )
        return self.copies.faults + found
