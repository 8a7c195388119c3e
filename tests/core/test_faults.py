"""Fault injection: each fault is either refused or named by `violations()`."""

import numpy as np
import pytest

from tests.core.conftest import RECORD, ROW, Bench, MakeBench
from vtoken_sglang.core.types import Generation, Row
from vtoken_sglang.errors import InvariantError


@pytest.fixture
def bench(make_bench: MakeBench) -> Bench:
    """A request with a repack in flight."""
    bench = make_bench(length=38)
    bench.keep_every(4)
    assert bench.step().submitted == 1
    assert bench.violations() == []
    return bench


def test_late_copy_of_an_ended_request_hits_no_one(bench: Bench) -> None:
    """The request is gone and all its pages have new owners when the copy finally runs."""
    copy = bench.copies.copies[0]
    bench.memory.pool.release(bench.reclaimer.close(ROW))
    bench.memory.rows[ROW] = 0
    length = bench.memory.pool.free_pages() * 4
    assert bench.memory.grow(2, 0, length)
    written = bench.memory.live(2, length)
    copy.finish()
    assert bench.memory.live(2, length) == written
    bench.step_until_due()
    assert bench.memory.pool.free_pages() == 2


def test_lost_copy_is_caught_before_the_commit(bench: Bench) -> None:
    seen = bench.seen()
    bench.copies.copies[0].over = True
    report = bench.step_until_due()
    assert (report.committed, report.dropped) == (0, 1)
    assert bench.reclaimer.copies.corrupt_copies == 1
    assert bench.seen() == seen
    assert "8 of 8 copied tokens differ" in bench.violations()[0]


@pytest.mark.parametrize("tear", ["tokens", "layers"])
def test_torn_copy_is_caught_before_the_commit(bench: Bench, tear: str) -> None:
    seen, copy = bench.seen(), bench.copies.copies[0]
    if tear == "tokens":
        copy.run(0, 7)
    else:
        copy.run_one_buffer()
    copy.over = True
    assert bench.reclaimer.settle(1.0).dropped == 1
    assert bench.seen() == seen
    assert "corrupt copy" in bench.violations()[0]


def test_a_source_overwritten_during_the_copy_is_caught(bench: Bench) -> None:
    copy = bench.copies.copies[0]
    bench.memory.write(copy.src[:1])
    copy.finish()
    assert bench.reclaimer.settle(1.0).dropped == 1
    assert "position 0" in bench.violations()[0]


@pytest.mark.parametrize("changed", ["generation", "record"])
def test_wrong_identity_is_refused(make_bench: MakeBench, changed: str) -> None:
    now: dict[str, object] = {"generation": 3, "record": RECORD}
    bench = make_bench(identity=lambda row: (now["generation"], now["record"]))
    bench.keep_every(4)
    bench.step()
    seen = bench.seen()
    now[changed] = 4 if changed == "generation" else object()
    report = bench.reclaimer.settle(1.0)
    assert (report.committed, report.dropped, report.held_pages) == (0, 1, 0)
    assert bench.seen() == seen
    assert bench.violations() == []


def test_a_moved_row_entry_is_refused(bench: Bench) -> None:
    """Someone rewrote the row during the copy (a checkpoint that should have been skipped)."""
    bench.memory.rows[ROW, 4] = 150
    assert bench.reclaimer.settle(1.0).dropped == 1
    assert any("outside their ledger page: 4" in line for line in bench.violations())


def test_double_free_is_named(bench: Bench) -> None:
    page = int(bench.memory.rows[ROW, 0]) // 4
    bench.memory.pool.free.append(page)
    assert bench.violations() == [
        f"page {page} is claimed more than once: ledger of row 1 x1, the free list x1"
    ]


def test_a_freed_destination_is_named(bench: Bench) -> None:
    page = int(bench.copies.copies[0].dst[0]) // 4
    bench.memory.pool.free.append(page)
    assert "repack of row 1" in bench.violations()[0]
    bench.memory.pool.release(bench.reclaimer.close(ROW))
    assert "a copy of an ended request" in bench.violations()[0]


def test_double_release_by_the_ledger_is_refused(bench: Bench) -> None:
    codes = bench.reclaimer.copies.pending[ROW].plan.source_codes
    bench.table.ledger.remove(codes)
    bench.copies.copies[0].finish()
    with pytest.raises(InvariantError, match="freed twice"):
        bench.table.ledger.remove(codes)


def test_unzeroed_row_entry_is_named(bench: Bench) -> None:
    bench.memory.rows[ROW, 5] = 150
    found = bench.violations()
    assert "row 1: evicted positions with a slot in the row: 5" in found
    assert "row 1: 12 live on the device, 11 on the host" in found


def test_a_live_entry_that_was_zeroed_is_named(bench: Bench) -> None:
    bench.memory.rows[ROW, 4] = 0
    assert "row 1: live positions with no slot in the row: 4" in bench.violations()


def test_a_slot_named_twice_is_named(bench: Bench) -> None:
    bench.memory.rows[ROW, 4] = bench.memory.rows[ROW, 0]
    assert any("slots named twice" in line for line in bench.violations())


def test_leaked_page_is_named(bench: Bench) -> None:
    leaked = bench.memory.pool.free.pop()
    assert bench.violations() == [f"pages claimed by no one: {leaked}"]


def test_page_zero_in_the_free_list_is_named(bench: Bench) -> None:
    bench.memory.pool.free.append(0)
    assert bench.violations() == ["page 0 or below is claimed by the free list"]


def test_wrong_counts_are_named(bench: Bench) -> None:
    bench.table.ledger.live[0] += 1
    bench.table.ledger.sealed_pages += 1
    bench.table.evicted += 1
    text = " | ".join(bench.violations())
    for part in (
        "counts 2 live, has 1",
        "sealed_pages is",
        "sealed_live is",
        "evicted is",
        "on the host",
    ):
        assert part in text


def test_a_row_reused_without_a_close_is_refused(bench: Bench) -> None:
    with pytest.raises(InvariantError, match="before it was closed"):
        bench.reclaimer.open(Row(ROW), Generation(9), object(), 0, 38)


def test_a_shrunken_row_is_named(bench: Bench) -> None:
    """Device and host disagree about the live length."""
    bench.memory.rows[ROW, 30:38] = 0
    assert any("live on the device" in line for line in bench.violations())


def test_a_healthy_row_is_silent_after_all_of_it(bench: Bench) -> None:
    bench.step_until_due()
    assert bench.violations() == []
    assert np.array_equal(sorted(bench.seen()), [p for p in range(38) if p % 4 == 0 or p >= 36])
