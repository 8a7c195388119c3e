"""Ids of the pages the engine opened, brought to the host without waiting for the device.

A page's id stands in the row at the page's start. It is asked for at the end of the safe point
that first saw the page, and used at the first eviction in it, which is later: the page is open, so
its tokens may not die, until it is full and no forward writes it. Only a request that ends, or dies
in a page before the answer came, waits.
"""

from collections.abc import Collection

import numpy as np

from vtoken_sglang.core.rows import LateRead, RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Int64Array


class PageReads:
    """Fills the UNREAD page ids of token tables. Scheduler thread only.

    Fields:
        waited: reads that blocked on the device since the start, 0 for ever on a host table.
    """

    def __init__(self, rows: RequestRows) -> None:
        self._rows = rows
        self._asked: list[tuple[TokenTable, int, int]] = []
        self._late: LateRead | None = None
        self.waited = 0

    def need(self, table: TokenTable, upto: int, tables: Collection[TokenTable]) -> None:
        """The ids of all pages that start at or before position `upto` are needed now. Where that
        costs a round trip, one gather serves all of `tables`."""
        if self._rows.on_host:
            start = table.unread_start()
            slots = self._rows.read(table.row, start, table.logical_len, table.page_size)
            table.set_unread(slots)
            return
        if self._late is not None and any(asked is table for asked, _, _ in self._asked):
            self.settle(wait=True)
        if table.ledger.has_unread and table.unread_start() <= upto:
            self.settle(wait=True)
            self.waited += 1
            self._read([one for one in tables if one.ledger.has_unread])

    def ask(self, tables: Collection[TokenTable]) -> None:
        """Start reading what is unread, unless an answer is still on its way."""
        if self._rows.on_host:
            return
        self.settle(wait=False)
        unread = [table for table in tables if table.ledger.has_unread]
        if not unread or self._late is not None:
            return
        rows, positions, self._asked = self._starts(unread)
        self._late = self._rows.gather_later(rows, positions)

    def settle(self, *, wait: bool) -> None:
        """Take over an answer that has come; with `wait`, one that is on its way, too."""
        if self._late is None or not (wait or self._late.ready()):
            return
        slots, self._late = self._late.values(), None
        at = 0
        for table, start, count in self._asked:
            # A table that ended meanwhile is nobody's; one that was read meanwhile needs nothing.
            if table.ledger.has_unread and table.unread_start() == start:
                table.set_unread(slots[at : at + count])
            at += count
        self._asked = []

    def _read(self, tables: Collection[TokenTable]) -> None:
        rows, positions, asked = self._starts(tables)
        slots = self._rows.gather(rows, positions)
        at = 0
        for table, _, count in asked:
            table.set_unread(slots[at : at + count])
            at += count

    def _starts(
        self, tables: Collection[TokenTable]
    ) -> tuple[Int64Array, Int64Array, list[tuple[TokenTable, int, int]]]:
        """Row and position of every unread page start, and per table its first and their count."""
        starts = [np.arange(t.unread_start(), t.logical_len, t.page_size) for t in tables]
        asked = [(t, t.unread_start(), len(s)) for t, s in zip(tables, starts, strict=True)]
        rows = np.repeat(np.array([t.row for t in tables], np.int64), [len(s) for s in starts])
        return rows, np.concatenate(starts), asked
