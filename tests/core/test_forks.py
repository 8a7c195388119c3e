"""Copy-on-write forks of the core: tree pages are read, never written or given back."""

import numpy as np
import pytest

from tests.core.conftest import ROW, MakeBench
from tests.helpers.marked_rows import Pages
from vtoken_sglang.core.types import LAG, PositionError

PAGE = 4
PROTECTED = 40


def tree_pages(bench_rows: object, protected: int) -> Pages:
    entries = bench_rows[1, :protected:PAGE].numpy()  # type: ignore[index]
    return (entries // PAGE).astype(np.int64)


@pytest.mark.parametrize("start", [0, 12, 36])
def test_fork_moves_live_tree_tokens_and_leaves_the_tree_alone(
    make_bench: MakeBench, start: int
) -> None:
    bench = make_bench(length=70, pages=60, protected=PROTECTED)
    pages = tree_pages(bench.memory.rows, PROTECTED)
    slots = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
    exact = bench.memory.digests(slots)
    bench.keep_every(3)
    before = bench.seen()
    live = len([pos for pos in before if start <= pos < PROTECTED])
    free = bench.memory.pool.free_pages()

    plan = bench.reclaimer.fork(ROW, start)

    assert plan is not None
    assert len(plan.positions) == live
    assert len(plan.dst_pages) == -(-live // PAGE)
    assert bench.memory.pool.free_pages() == free - len(plan.dst_pages)
    for _ in range(LAG):
        assert bench.step().forked == ()
        assert bench.seen() == before, "nothing is committed before the copy is due"
    report = bench.step()
    assert (report.forked, report.given_up) == (((ROW, start),), ())
    assert bench.table.protected_len == start
    assert bench.seen() == before
    assert bench.survivors_intact()
    assert bench.memory.digests(slots) == exact
    entries = bench.memory.rows[1, start:PROTECTED].numpy()
    assert not set((entries[entries > 0] // PAGE).tolist()) & set(pages.tolist())
    # What the tree still shares with the row, and what it keeps for others, is not ours.
    assert bench.violations(pages.tolist()) == []


def test_fork_of_an_evicted_range_needs_no_page(make_bench: MakeBench) -> None:
    bench = make_bench(length=70, pages=60, protected=PROTECTED)
    pages = tree_pages(bench.memory.rows, PROTECTED)
    bench.reclaimer.evict_tokens(ROW, np.arange(20, PROTECTED))
    free = bench.memory.pool.free_pages()
    assert bench.reclaimer.fork(ROW, 20) is not None
    assert bench.memory.pool.free_pages() == free
    bench.reclaimer.settle(1.0)
    assert bench.table.protected_len == 20
    assert bench.violations(pages.tolist()) == []


def test_token_evicted_during_the_copy_stays_evicted(make_bench: MakeBench) -> None:
    bench = make_bench(length=70, pages=60, protected=PROTECTED)
    pages = tree_pages(bench.memory.rows, PROTECTED)
    bench.keep_every(3)
    bench.reclaimer.fork(ROW, 0)
    bench.reclaimer.evict_tokens(ROW, [3, 6])
    before = bench.seen()
    bench.reclaimer.settle(1.0)
    assert bench.seen() == before
    assert not {3, 6} & set(before)
    assert bench.violations(pages.tolist()) == []


def test_forked_tokens_can_be_evicted_and_their_pages_come_back(make_bench: MakeBench) -> None:
    bench = make_bench(length=70, pages=60, protected=PROTECTED)
    pages = tree_pages(bench.memory.rows, PROTECTED)
    bench.keep_every(3)
    bench.reclaimer.fork(ROW, 0)
    bench.reclaimer.settle(1.0)
    held = bench.reclaimer.private_pages(ROW)
    bench.reclaimer.evict_tokens(ROW, np.arange(0, PROTECTED))
    report = bench.step()
    assert report.freed_empty_pages >= 3
    assert bench.reclaimer.private_pages(ROW) < held
    assert bench.violations(pages.tolist()) == []


def test_close_during_the_copy_holds_the_destinations(make_bench: MakeBench) -> None:
    bench = make_bench(length=70, pages=60, protected=PROTECTED)
    pages = tree_pages(bench.memory.rows, PROTECTED)
    bench.keep_every(3)
    plan = bench.reclaimer.fork(ROW, 0)
    assert plan is not None
    freed = bench.reclaimer.close(ROW)
    assert not set(freed.tolist()) & (set(pages.tolist()) | set(plan.dst_pages.tolist()))
    assert bench.reclaimer.held_pages() == len(plan.dst_pages)
    bench.memory.pool.release(freed)
    assert bench.reclaimer.settle(1.0).forked == ()
    assert bench.violations(pages.tolist()) == []


def test_one_copy_per_row_and_no_fork_without_pages(make_bench: MakeBench) -> None:
    bench = make_bench(length=70, pages=60, protected=PROTECTED)
    bench.keep_every(3)
    assert bench.reclaimer.fork(ROW, 20) is not None
    assert bench.reclaimer.fork(ROW, 0) is None, "a copy of the row is in flight"
    bench.reclaimer.settle(1.0)
    bench.memory.pool.allocate(bench.memory.pool.free_pages())
    assert bench.reclaimer.fork(ROW, 0) is None


@pytest.mark.parametrize("length", [-4, 2, PROTECTED, PROTECTED + 4])
def test_bad_boundary_is_refused(make_bench: MakeBench, length: int) -> None:
    bench = make_bench(length=70, pages=60, protected=PROTECTED)
    bench.keep_every(3)
    with pytest.raises(PositionError, match="new_protected_len"):
        bench.reclaimer.fork(ROW, length)


def test_a_fork_that_fails_is_given_up_and_may_be_tried_again(make_bench: MakeBench) -> None:
    bench = make_bench(length=70, pages=60, protected=PROTECTED)
    pages = tree_pages(bench.memory.rows, PROTECTED)
    bench.keep_every(3)
    before = bench.seen()
    bench.reclaimer.fork(ROW, 0)
    bench.copies.copies[0].over = True  # its bytes never arrived
    report = bench.reclaimer.settle(1.0)
    assert (report.forked, report.given_up, report.dropped) == ((), (ROW,), 1)
    assert (bench.table.protected_len, bench.seen()) == (PROTECTED, before)
    bench.reclaimer.copies.faults.clear()
    assert bench.violations(pages.tolist()) == []
    assert bench.reclaimer.fork(ROW, 0) is not None
    assert bench.reclaimer.settle(1.0).forked == ((ROW, 0),)
    assert bench.seen() == before
