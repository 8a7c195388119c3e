"""Copies that were submitted: held until the step at which they are due, then committed or freed.

submitted at step i ──step i + LAG, plan still fits──▶ sources free, destinations in the ledger
    │ request ended / plan stale / bytes wrong / copy failed
    └──step i + LAG──▶ destinations free           (never before: a late write may still come)
"""

import time
from collections import deque
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
    row_hashes,
)
from vtoken_sglang.core.copy_engine import CopyEngine
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import LAG, CopyFailedError, Int64Array, RepackPlan, Row
from vtoken_sglang.errors import InvariantError, StalePlanError

COPY_TIMEOUT: Final = 30.0
"""Seconds after which a copy that is due and not over is an error."""
_MAX_FAULTS: Final = 64


@dataclass(slots=True)
class Settled:
    """What became of the copies that were due.

    Fields:
        committed, dropped: plans committed / given up.
        moved_tokens: row entries written.
        source_pages: page ids set free by commits; the caller releases them.
        unused_pages: destinations of plans that were given up; the caller releases them.
        forked, given_up: see `StepReport`.
        failures: copies that failed; the caller raises one once its own state is consistent.
    """

    committed: int = 0
    dropped: int = 0
    moved_tokens: int = 0
    source_pages: list[Int64Array] = field(default_factory=list)
    unused_pages: list[Int64Array] = field(default_factory=list)
    forked: list[tuple[Row, int]] = field(default_factory=list)
    given_up: list[Row] = field(default_factory=list)
    failures: list[CopyFailedError] = field(default_factory=list)

    @property
    def pages(self) -> list[Int64Array]:
        """Everything the caller releases."""
        return self.source_pages + self.unused_pages


class CopiesInFlight:
    """Every submitted copy that is not due yet.

    Fields:
        pending: the plan in flight per row, one at most, of requests that still run.
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
        self._step = 0  # number of the step that runs, or comes next
        self._in_flight: deque[PendingCopy] = deque()  # by due step
        self.pending: dict[Row, PendingCopy] = {}
        self.corrupt_copies = 0
        self.faults: list[str] = []

    @property
    def busy(self) -> bool:
        """Whether any destination is held."""
        return bool(self._in_flight)

    def held_pages(self) -> int:
        """Destination pages held, those of ended requests included."""
        return sum(len(copy.plan.dst_pages) for copy in self._in_flight)

    def abandoned(self) -> list[Int64Array]:
        """Destination pages of the copies whose request has ended."""
        return [copy.plan.dst_pages for copy in self._in_flight if not self._wanted(copy)]

    def _wanted(self, copy: PendingCopy) -> bool:
        return self.pending.get(copy.plan.row) is copy

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
            copy = PendingCopy(plan=plan, fence=fence, due=self._step + LAG, hashes=row_hash)
            self.pending[plan.row] = copy
            self._in_flight.append(copy)

    def abandon(self, row: Row) -> None:
        """The row's request ends: its plan in flight, if any, is not committed."""
        self.pending.pop(row, None)

    def next_step(self) -> None:
        """The step is over; what is submitted from now on belongs to the next one."""
        self._step += 1

    def settle(
        self, tables: Mapping[Row, TokenTable], *, everything: bool, timeout: float
    ) -> Settled:
        """Commit the plans whose copy is due in this step (or everything in flight), give up those
        that no longer fit, and collect the pages this sets free.

        Waits for each of them, up to `timeout` seconds together. Raises InvariantError, having
        changed nothing, if one is not over by then.
        """
        done = Settled()
        due = [copy for copy in self._in_flight if everything or copy.due <= self._step]
        failures = self._wait(due, timeout)
        writes = RowWrites([], [], [])
        try:
            for copy, failure in zip(due, failures, strict=True):
                self._in_flight.popleft()
                self._settle_one(copy, failure, tables, writes, done)
        finally:
            # Host state of the rows committed so far has changed: their entries must follow.
            done.moved_tokens = writes.flush(self._rows)
        return done

    def _wait(self, copies: Sequence[PendingCopy], timeout: float) -> list[CopyFailedError | None]:
        """What stopped each copy; None for those whose bytes arrived."""
        deadline = time.monotonic() + timeout
        failures: list[CopyFailedError | None] = []
        for copy in copies:
            try:
                over = copy.fence.wait(max(0.0, deadline - time.monotonic()))
            except CopyFailedError as failure:
                failures.append(failure)
                continue
            if not over:
                wrong = f"a copy did not finish in {timeout} s; its pages are held"
                raise InvariantError(f"row {copy.plan.row}: {wrong}")
            failures.append(None)
        return failures

    def _settle_one(
        self,
        copy: PendingCopy,
        failure: CopyFailedError | None,
        tables: Mapping[Row, TokenTable],
        writes: RowWrites,
        done: Settled,
    ) -> None:
        plan = copy.plan
        if failure is not None:
            done.failures.append(failure)
        if not self._wanted(copy):
            done.unused_pages.append(plan.dst_pages)
            done.dropped += 1
            return
        del self.pending[plan.row]
        table = tables[plan.row]
        if failure is None and self._commit(copy, table, writes):
            done.committed += 1
            done.source_pages.append(plan.source_pages)
            if plan.new_protected_len is not None:
                done.forked.append((plan.row, plan.new_protected_len))
            return
        table.ledger.unreserve(plan.source_codes)
        done.unused_pages.append(plan.dst_pages)
        done.dropped += 1
        if plan.new_protected_len is not None:
            done.given_up.append(plan.row)

    def _commit(self, copy: PendingCopy, table: TokenTable, writes: RowWrites) -> bool:
        """Whether the plan still fitted and was committed."""
        try:
            check_identity(copy.plan, table, self._identity)
            if self._check:
                check_bytes(copy, table, self._rows, self._buffers)
            commit(copy.plan, table, writes)
        except CorruptCopyError as error:
            self.corrupt_copies += 1
            if len(self.faults) < _MAX_FAULTS:
                self.faults.append(f"corrupt copy: {error}")
            return False
        except StalePlanError:
            return False
        return True
