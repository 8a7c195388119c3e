"""The reclaimer: per-token evictions in, free pages out. Drives table, planner, copies and commits.

    glue (scheduler thread, between two forwards)
      open / sync_new_tokens / evict_tokens      liveness only, nothing moves
      fork                                       start to copy a shared prefix
      step                                       1 commit the copies that are due   2 free empty
                                                 pages   3 plan and submit repacks
      settle                                     commit everything in flight, now
      close                                      a request ends

Who owns a page of a pruned request, at any time exactly one of:
  * its table's ledger (sources of a plan in flight included),
  * a copy in flight, as destination, until the step at which it is due, even when its request ends,
  * the pool.

All of this changes in the scheduler thread only. The copy itself runs elsewhere and touches
nothing but K/V rows nobody else writes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from vtoken_sglang.core.commit import Identity
from vtoken_sglang.core.copies import COPY_TIMEOUT, CopiesInFlight, Settled
from vtoken_sglang.core.copy_engine import CopyEngine
from vtoken_sglang.core.invariants import Holdings, find_violations
from vtoken_sglang.core.planner import make_fork, make_plans
from vtoken_sglang.core.rows import PageReads, RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import (
    Generation,
    Int32Array,
    Int64Array,
    IntArray,
    PagePool,
    PositionError,
    ReclaimSettings,
    RepackPlan,
    Row,
    StepReport,
)
from vtoken_sglang.errors import InvariantError


class Reclaimer:
    """Token tables of all pruned requests, and the pages their evictions set free.

    Fields:
        evicted_counts: int32 [num_rows], host: evicted positions per row, 0 for rows without a
            table. Live length of a row = logical length - evicted_counts[row]. Read only.
        copies: copies in flight; `copies.corrupt_copies` counts those with wrong bytes.
    """

    def __init__(
        self,
        *,
        rows: RequestRows,
        buffers: Sequence[torch.Tensor],
        pool: PagePool,
        copier: CopyEngine,
        settings: ReclaimSettings,
        identity: Identity | None = None,
    ) -> None:
        """`rows`: the engine's req_to_token. `buffers`: K and V of every layer,
        [num_slots, heads, dim]. `identity`: asked again before every commit."""
        self._rows = rows
        self._page_reads = PageReads(rows)
        self._pool = pool
        self._settings = settings
        self._tables: dict[Row, TokenTable] = {}
        self.evicted_counts: Int32Array = np.zeros(len(rows), np.int32)
        self.copies = CopiesInFlight(
            rows=rows,
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
        page start is evicted.
        """
        if row in self._tables:
            raise InvariantError(f"row {row}: opened again before it was closed")
        size = self._pool.page_size
        pages = self._rows.read(row, protected_len, logical_len, size) // size
        if len(pages) and int(pages.min()) < 1:
            raise InvariantError(
                f"row {row}: a private page start is evicted before the first eviction"
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

    def sync_new_tokens(self, row: Row, logical_len: int) -> None:
        """Positions up to `logical_len` were appended by the engine (see TokenTable)."""
        self._tables[row].sync_new_tokens(logical_len)

    def evict_tokens(self, row: Row, positions: IntArray | Sequence[int]) -> int:
        """Mark tokens of a row evicted: count them and zero their row entries. Returns how many
        were alive until now. Raises PositionError (see TokenTable.evict_tokens), having changed
        nothing."""
        table = self._tables[row]
        if table.ledger.has_unread and len(positions):
            # Before an eviction can zero the start of one of them.
            self._page_reads.need(table, int(np.max(positions)), self._tables.values())
        evicted = table.evict_tokens(positions)
        if len(evicted):
            self._rows.zero(row, evicted)
            self.evicted_counts[row] = table.evicted
        return len(evicted)

    def close(self, row: Row) -> Int64Array:
        """The request ends (finish, abort, retract). Returns every private page it holds, the tail
        included, for the caller to free; sync_new_tokens must have seen all allocated positions.
        Destinations of its copy in flight stay held until that is due. Unknown rows return no
        pages."""
        self.copies.abandon(row)
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
        """Destination pages held by copies in flight, those of ended requests included."""
        return self.copies.held_pages()

    def abandoned_pages(self) -> int:
        """Of those, pages whose request has ended: no request's record counts them."""
        return sum(map(len, self.copies.abandoned()))

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

        Raises CopyFailedError after everything else of the step is done, if a copy failed;
        InvariantError if one that is due does not end.
        """
        done = self.copies.settle(self._tables, everything=False, timeout=COPY_TIMEOUT)
        empty: list[Int64Array] = []
        eligible: list[TokenTable] = []
        repackable = self._pool.page_size > 1
        if self._settings.reclaim:
            for row, upto in sealed_upto.items():
                table = self._tables.get(row)
                if table is None:
                    continue
                table.seal(upto)
                if table.ledger.has_empty and len(pages := table.ledger.take_empty()):
                    empty.append(pages)
                if repackable and row not in self.copies.pending:
                    eligible.append(table)
        self._release([*done.pages, *empty])
        plans: list[RepackPlan] = []
        if eligible:
            plans = make_plans(eligible, self._pool, self._settings, pressure, reserve_pages)
            self._submit(plans)
        self._page_reads.ask(self._tables.values())
        self.copies.next_step()
        return self._report(done, empty, plans)

    def settle(self, timeout: float) -> StepReport:
        """Commit everything in flight, waiting for it up to `timeout` seconds; afterwards no
        destination is held. When memory is short, the loop idle, or copies must not overlap.

        Raises CopyFailedError after that, if a copy failed; InvariantError, having changed nothing,
        if one does not end.
        """
        done = self.copies.settle(self._tables, everything=True, timeout=timeout)
        self._release(done.pages)
        return self._report(done, [], [])

    drain = settle  # when the engine goes idle or is flushed

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

    def _release(self, pages: list[Int64Array]) -> None:
        if pages:
            self._pool.release(np.concatenate(pages))

    def _submit(self, plans: list[RepackPlan]) -> None:
        if not plans:
            return
        try:
            self.copies.submit(plans, self._tables)
        except BaseException:
            self._release([plan.dst_pages for plan in plans])
            raise

    def _report(
        self, done: Settled, empty: list[Int64Array], plans: list[RepackPlan]
    ) -> StepReport:
        if done.failures:
            raise done.failures[0]
        return StepReport(
            committed=done.committed,
            dropped=done.dropped,
            moved_tokens=done.moved_tokens,
            freed_empty_pages=sum(map(len, empty)),
            freed_source_pages=sum(map(len, done.source_pages)),
            submitted=len(plans),
            submitted_tokens=sum(len(plan.positions) for plan in plans),
            taken_pages=sum(len(plan.dst_pages) for plan in plans),
            forked=tuple(done.forked),
            given_up=tuple(done.given_up),
            held_pages=self.copies.held_pages(),
        )

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
            abandoned=self.copies.abandoned(),
            evicted_counts=self.evicted_counts,
        )
        found = find_violations(
            holdings, self._rows, free_pages, other_pages=other_pages, total_pages=total_pages
        )
        return self.copies.faults + found
