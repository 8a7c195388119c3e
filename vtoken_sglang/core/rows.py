"""The engine's `req_to_token` rows: batched reads and writes, on the caller's stream.

Only the scheduler thread calls this, at the safe point between two forwards (DESIGN: rows, counts
and ledger change together). On a CUDA device a read waits for the current stream, so the ids of
pages that the engine opens are read late (`PageReads`).
"""

from collections.abc import Collection
from typing import Any, Protocol

import numpy as np
import torch

from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import LAG, Int32Array, Int64Array, IntArray, Row
from vtoken_sglang.errors import InvariantError
from vtoken_sglang.kernels.upload import upload


class DeviceEvent(Protocol):
    """The part of a CUDA event that is used."""

    def synchronize(self) -> None: ...


class LateRead:
    """Row entries on their way to the host.

    `values`: int32, host, where they arrive. `event`: recorded behind them; None if they are there.
    """

    def __init__(self, values: torch.Tensor, event: DeviceEvent | None) -> None:
        self._values, self._event = values, event

    def values(self) -> Int64Array:
        """The entries, in the order they were asked for; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        host: Int64Array = self._values.numpy().astype(np.int64)
        return host


class RequestRows:
    """The engine's row table.

    Fields:
        tensor: int32 [num_rows, width], the engine's own tensor; 0 = evicted or never used.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise InvariantError(f"rows: int32 [num_rows, width], got {got}")
        self.tensor = tensor
        self._host: Int32Array | None = tensor.numpy() if tensor.device.type == "cpu" else None

    def __len__(self) -> int:
        return self.tensor.shape[0]

    @property
    def on_host(self) -> bool:
        """Whether reading is a plain memory access."""
        return self._host is not None

    def read(self, row: Row, start: int, end: int, step: int = 1) -> Int64Array:
        """Entries [start, end) of a row, every `step`-th, as host int64."""
        if self._host is not None:
            return self._host[row, start:end:step].astype(np.int64)
        part = self.tensor[row, start:end:step]
        host: Int64Array = part.cpu().numpy().astype(np.int64)
        return host

    def gather(self, row_ids: IntArray, positions: IntArray) -> Int64Array:
        """Entries at (row_ids[i], positions[i]), as host int64."""
        if self._host is not None:
            return self._host[row_ids, positions].astype(np.int64)
        host: Int64Array = self._entries(row_ids, positions).cpu().numpy().astype(np.int64)
        return host

    def gather_later(self, row_ids: IntArray, positions: IntArray) -> LateRead:
        """As `gather`, but the host goes on; ordered after what the current stream holds now."""
        found = self._entries(row_ids, positions)
        if not self.tensor.is_cuda:
            return LateRead(found, None)
        host = torch.empty_like(found, device="cpu", pin_memory=True)
        host.copy_(found, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return LateRead(host, event)

    def _entries(self, row_ids: IntArray, positions: IntArray) -> torch.Tensor:
        where = upload(np.stack([row_ids, positions]), self.tensor.device)
        return self.tensor[where[0], where[1]]

    def zero(self, row: Row, positions: Int64Array) -> None:
        """Mark entries of one row evicted."""
        if self._host is not None:
            self._host[row, positions] = 0
        else:
            self.tensor[row].index_fill_(0, upload(positions, self.tensor.device), 0)

    def write(self, row_ids: Int64Array, positions: Int64Array, slots: Int64Array) -> None:
        """Set the entries at (row_ids[i], positions[i]) to slots[i], in one launch; no entry twice.

        (Paper: `apply_moves`.) Neither the upload nor an index of int64 tensors makes the host wait
        for a CUDA device.
        """
        if self._host is not None:
            self._host[row_ids, positions] = slots
            return
        where = upload(np.stack([row_ids, positions, slots]), self.tensor.device)
        self.tensor[where[0], where[1]] = where[2].to(torch.int32)


class PageReads:
    """Fills the UNREAD page ids of token tables, on a device without waiting for it.

    A page's id stands in the row at the page's start. It is asked for at the end of the safe point
    that first saw the page, taken LAG safe points later, and used at the first eviction in the
    page, which is later still: the page is open, so its tokens may not be evicted, until it is full
    and no forward writes it. Only a request that ends, or evicts from a page before the answer was
    due, waits. Scheduler thread only.
    """

    def __init__(self, rows: RequestRows) -> None:
        self._rows = rows
        self._step = 0  # calls of `ask` so far
        self._due = 0  # the call that takes the answer
        self._asked: list[tuple[TokenTable, int, int]] = []
        self._late: LateRead | None = None

    def need(self, table: TokenTable, upto: int, tables: Collection[TokenTable]) -> None:
        """The ids of all pages that start at or before position `upto` are needed now. Where that
        costs a round trip, one gather serves all of `tables`."""
        if self._rows.on_host:
            start = table.unread_start()
            slots = self._rows.read(table.row, start, table.logical_len, table.page_size)
            table.set_unread(slots)
            return
        if any(asked is table for asked, _, _ in self._asked):
            self._take()
        if table.ledger.has_unread and table.unread_start() <= upto:
            self._take()
            unread = [one for one in tables if one.ledger.has_unread]
            row_ids, positions, self._asked = self._starts(unread)
            self._store(self._rows.gather(row_ids, positions))

    def ask(self, tables: Collection[TokenTable]) -> None:
        """The safe point ends: take an answer that is due, and start reading what is unread unless
        an answer is still on its way."""
        if self._rows.on_host:
            return
        self._step += 1
        if self._step >= self._due:
            self._take()
        unread = [table for table in tables if table.ledger.has_unread]
        if not unread or self._late is not None:
            return
        row_ids, positions, self._asked = self._starts(unread)
        self._late = self._rows.gather_later(row_ids, positions)
        self._due = self._step + LAG

    def _take(self) -> None:
        """Wait for the answer that is on its way, if one is."""
        if self._late is not None:
            late, self._late = self._late, None
            self._store(late.values())

    def _store(self, slots: Int64Array) -> None:
        at = 0
        for table, start, count in self._asked:
            # A table that ended meanwhile is nobody's; one that was read meanwhile needs nothing.
            if table.ledger.has_unread and table.unread_start() == start:
                table.set_unread(slots[at : at + count])
            at += count
        self._asked = []

    def _starts(
        self, tables: Collection[TokenTable]
    ) -> tuple[Int64Array, Int64Array, list[tuple[TokenTable, int, int]]]:
        """Row and position of every unread page start, and per table its first and their count."""
        starts = [np.arange(t.unread_start(), t.logical_len, t.page_size) for t in tables]
        asked = [(t, t.unread_start(), len(s)) for t, s in zip(tables, starts, strict=True)]
        row_ids = np.repeat(np.array([t.row for t in tables], np.int64), [len(s) for s in starts])
        return row_ids, np.concatenate(starts), asked
