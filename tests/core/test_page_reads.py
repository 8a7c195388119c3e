"""Page ids of a table whose rows are on a device: asked for ahead, never waited for in decode."""

import numpy as np
import pytest
import torch

from vtoken_sglang.core.rows import LateRead, PageReads, RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import LAG, Generation, Row

SIZE = 4


class HeldEvent:
    """An event that passes when the test says so, or when somebody waits for it."""

    def __init__(self) -> None:
        self.passed, self.waits = False, 0

    def synchronize(self) -> None:
        self.waits += not self.passed
        self.passed = True


class DeviceRows(RequestRows):
    """Rows that are read as a device's are: `gather_later` answers when somebody waits."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._host = None
        self.events: list[HeldEvent] = []
        self.blocking = 0

    def gather(self, row_ids, positions):  # type: ignore[no-untyped-def]
        self.blocking += 1
        return super().gather(row_ids, positions)

    def gather_later(self, row_ids, positions):  # type: ignore[no-untyped-def]
        self.events.append(HeldEvent())
        values = super().gather(row_ids, positions)
        return LateRead(torch.from_numpy(values.astype(np.int32)), self.events[-1])


def opened(rows: RequestRows, row: int, length: int) -> TokenTable:
    """A table whose first page is known; position p of row r is in slot 100 * r + p."""
    rows.tensor[row, :length] = 100 * row + torch.arange(length, dtype=torch.int32)
    table = TokenTable(
        row=Row(row),
        generation=Generation(0),
        record=object(),
        page_size=SIZE,
        protected_len=0,
        logical_len=SIZE,
        pages=np.array([100 * row // SIZE]),
    )
    table.sync_new_tokens(length)
    return table


@pytest.fixture
def rows() -> DeviceRows:
    return DeviceRows(torch.zeros(4, 64, dtype=torch.int32))


def test_an_answer_is_taken_when_it_is_due_and_then_costs_no_wait(rows: DeviceRows) -> None:
    tables = [opened(rows, 1, 14), opened(rows, 2, 9)]
    reads = PageReads(rows)
    for _ in range(LAG):
        reads.ask(tables)
        assert all(t.ledger.has_unread for t in tables)
    rows.events[0].passed = True
    reads.ask(tables)
    assert [t.ledger.has_unread for t in tables] == [False, False]
    assert tables[0].ledger.page[:4].tolist() == [25, 26, 27, 28]
    assert tables[1].ledger.page[:3].tolist() == [50, 51, 52]
    assert (rows.blocking, len(rows.events), rows.events[0].waits) == (0, 1, 0)


def test_pages_opened_while_an_answer_is_on_its_way_are_asked_for_next(rows: DeviceRows) -> None:
    table = opened(rows, 1, 6)
    rows.tensor[1, :40] = 100 + torch.arange(40, dtype=torch.int32)
    reads = PageReads(rows)
    reads.ask([table])
    table.sync_new_tokens(15)
    for _ in range(LAG - 1):
        reads.ask([table])
    assert len(rows.events) == 1
    reads.ask([table])
    assert (len(rows.events), table.unread_start()) == (2, 8)
    for _ in range(LAG):
        reads.ask([table])
    assert table.ledger.page[:4].tolist() == [25, 26, 27, 28]


def test_an_eviction_below_the_unread_pages_waits_for_nothing(rows: DeviceRows) -> None:
    table = opened(rows, 1, 6)
    reads = PageReads(rows)
    reads.need(table, 3, [table])
    assert (rows.blocking, table.ledger.has_unread) == (0, True)
    reads.need(table, 4, [table])
    assert (rows.blocking, table.ledger.has_unread) == (1, False)


def test_an_eviction_that_needs_an_answer_waits_for_that_one(rows: DeviceRows) -> None:
    table = opened(rows, 1, 6)
    reads = PageReads(rows)
    reads.ask([table])
    reads.need(table, 5, [table])
    assert (rows.events[0].waits, rows.blocking, table.ledger.has_unread) == (1, 0, False)


def test_a_late_answer_does_not_overwrite_a_newer_read(rows: DeviceRows) -> None:
    first, second = opened(rows, 1, 6), opened(rows, 2, 6)
    reads = PageReads(rows)
    reads.ask([first])
    reads.need(second, 5, [second])
    assert second.ledger.page[:2].tolist() == [50, 51]
    assert first.ledger.page[:2].tolist() == [25, 26]
    assert rows.blocking == 1


def test_a_host_table_is_read_at_once() -> None:
    rows = RequestRows(torch.zeros(4, 64, dtype=torch.int32))
    table = opened(rows, 1, 14)
    reads = PageReads(rows)
    reads.ask([table])
    assert table.ledger.has_unread
    reads.need(table, 3, [table])
    assert table.ledger.page[:4].tolist() == [25, 26, 27, 28]
