"""Copies that were submitted: commit them when they are over, hold their destinations until then.

submitted ──fence passed, plan still fits──▶ committed: sources free, destinations in the ledger
    │ request ended / plan stale / bytes wrong / copy failed
    ▼
orphan ──fence passed──▶ destinations free          (never before: a late write may still come)
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from vtoken_sglang.core.commit import (
    CorruptCopyError,
    Identity,
    PendingCopy,
    RowWrites,
    check_bytes,
    check_identity,
    commit,
)
from vtoken_sglang.core.copy_engine import CopyEngine
from vtoken_sglang.core.faults import CopyFailedError
from vtoken_sglang.core.fence import Fence
from vtoken_sglang.core.plan import RepackPlan
from vtoken_sglang.core.row_hash import row_hashes
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Int64Array, Row
from vtoken_sglang.errors import StalePlanError

_FAULTS_KEPT: Final = 64


@dataclass(slots=True)
class Settled:
    """What one look at the copies in flight came to.

    Fields:
        committed, dropped: plans committed / given up.
        moved_tokens: row entries committed.
        source_pages: page ids set free by commits; the caller releases them.
        orphan_pages: page ids of given-up copies that are over; the caller releases them.
        forked: (row, new tree-owned length) of forks that were committed.
        failures: copies that failed; the caller raises one once its own state is consistent.
    """

    committed: int = 0
    dropped: int = 0
    moved_tokens: int = 0
    source_pages: list[Int64Array] = field(default_factory=list)
    orphan_pages: list[Int64Array] = field(default_factory=list)
    failures: list[CopyFailedError] = field(default_factory=list)
    forked: list[tuple[Row, int]] = field(default_factory=list)


class CopiesInFlight:
    """Pending repacks, one per row at most, and orphaned copies.

    Fields:
        pending: the submitted repack per row.
        orphans: (destination pages, fence) of copies whose plan was given up.
        corrupt_copies: copies given up because their bytes were wrong (check mode).
        faults: one line per corrupt copy, the first ones.
    """

    def __init__(
        self,
        *,
        rows: RequestRows,
        buffers: Sequence[torch.Tensor],
        copier: CopyEngine,
        check: bool,
        identity: Identity | None,
    ) -> None:
        self._rows = rows
        self._buffers = buffers
        self._copier = copier
        self._check = check
        self._identity = identity
        self.pending: dict[Row, PendingCopy] = {}
        self.orphans: list[tuple[Int64Array, Fence]] = []
        self.corrupt_copies = 0
        self.faults: list[str] = []

    @property
    def busy(self) -> bool:
        """Whether any destination is held."""
        return bool(self.pending or self.orphans)

    def held_pages(self) -> int:
        """Destination pages held by pending or orphaned copies."""
        pending = sum(len(copy.plan.dst_pages) for copy in self.pending.values())
        return pending + sum(len(pages) for pages, _ in self.orphans)

    def submit(self, plans: Sequence[RepackPlan], tables: Mapping[Row, TokenTable]) -> None:
        """Start the copies of these plans, as one batch with one fence.

        Raises what the copy engine raises, having changed nothing: the caller still owns the
        destinations.
        """
        src = np.concatenate([plan.src_slots for plan in plans]).astype(np.int64)
        dst = np.concatenate([plan.dst_slots for plan in plans])
        hashes: list[torch.Tensor | None] = [None] * len(plans)
        if self._check:
            hashes = [row_hashes(self._buffers, p.src_slots.astype(np.int64)) for p in plans]
        fence = self._copier.submit(self._buffers, src, dst)
        for plan, row_hash in zip(plans, hashes, strict=True):
            tables[plan.row].ledger.reserve(plan.source_codes)
            self.pending[plan.row] = PendingCopy(plan=plan, fence=fence, hashes=row_hash)

    def cancel(self, row: Row, table: TokenTable | None) -> None:
        """Give up the row's pending repack, if any: its destinations become an orphan's."""
        copy = self.pending.pop(row, None)
        if copy is None:
            return
        self.orphans.append((copy.plan.dst_pages, copy.fence))
        if table is not None:
            table.ledger.unreserve(copy.plan.source_codes)

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for every fence; failures stay for `settle` to find."""
        deadline = time.monotonic() + timeout
        fences = [copy.fence for copy in self.pending.values()] + [f for _, f in self.orphans]
        for fence in fences:
            try:
                fence.wait(max(0.0, deadline - time.monotonic()))
            except CopyFailedError:
                continue

    def settle(self, tables: Mapping[Row, TokenTable]) -> Settled:
        """Commit every repack whose copy is over, give up those that no longer fit, and collect the
        pages this sets free. Never blocks."""
        done = Settled()
        if not self.busy:
            return done
        writes = RowWrites([], [], [])
        try:
            for copy in list(self.pending.values()):
                self._settle_one(copy, tables, writes, done)
        finally:
            # Host state of the rows committed so far has changed: their entries must follow.
            done.moved_tokens = writes.flush(self._rows)
        self._release_orphans(done)
        return done

    def _settle_one(
        self,
        copy: PendingCopy,
        tables: Mapping[Row, TokenTable],
        writes: RowWrites,
        done: Settled,
    ) -> None:
        row = copy.plan.row
        table = tables.get(row)
        try:
            if not copy.fence.passed():
                return
            owner = check_identity(copy.plan, table, self._identity)
            if self._check:
                check_bytes(copy, owner, self._rows, self._buffers)
            pages = commit(copy.plan, owner, writes)
        except CopyFailedError as failure:
            done.failures.append(failure)
        except CorruptCopyError as error:
            self._note_corrupt(error)
        except StalePlanError:
            pass
        else:
            del self.pending[row]
            if copy.plan.new_protected_len is not None:
                done.forked.append((row, copy.plan.new_protected_len))
            done.source_pages.append(pages)
            done.committed += 1
            return
        self.cancel(row, table)
        done.dropped += 1

    def _release_orphans(self, done: Settled) -> None:
        waiting: list[tuple[Int64Array, Fence]] = []
        for pages, fence in self.orphans:
            try:
                over = fence.passed()
            except CopyFailedError as failure:
                over = True
                if not done.failures:
                    done.failures.append(failure)
            if over:
                done.orphan_pages.append(pages)
            else:
                waiting.append((pages, fence))
        self.orphans = waiting

    def _note_corrupt(self, error: CorruptCopyError) -> None:
        self.corrupt_copies += 1
        if len(self.faults) < _FAULTS_KEPT:
            self.faults.append(f"corrupt copy: {error}")
