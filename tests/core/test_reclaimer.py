"""Free and repack through the public interface, with copies under the test's control."""

import numpy as np
import pytest

from tests.core.conftest import RECORD, ROW, MakeBench
from tests.helpers.fake_fence import ManualCopyEngine
from tests.helpers.marked_rows import MarkedRows
from vtoken_sglang.core.copy_engine import SyncCopyEngine, ThreadCopyEngine
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.types import (
    LAG,
    CopyFailedError,
    Generation,
    PositionError,
    ReclaimSettings,
    Row,
)
from vtoken_sglang.errors import InvariantError


def test_evictions_zero_the_row_and_count(make_bench: MakeBench) -> None:
    bench = make_bench()
    assert bench.reclaimer.evict_tokens(ROW, [3, 4, 4]) == 2
    assert bench.reclaimer.evict_tokens(ROW, np.arange(12)) == 10
    assert bench.memory.rows[ROW, :13].tolist()[:12] == [0] * 12
    assert bench.reclaimer.evicted_counts[ROW] == 12
    assert bench.table.live_len == 26
    assert bench.violations() == []


def test_a_refused_eviction_changes_nothing(make_bench: MakeBench) -> None:
    bench = make_bench()
    before = bench.memory.rows.clone()
    with pytest.raises(PositionError):
        bench.reclaimer.evict_tokens(ROW, np.append(np.arange(20), 37))
    assert bench.memory.rows.equal(before)
    assert bench.violations() == []


def test_empty_pages_are_freed_without_a_copy(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    free = bench.memory.pool.free_pages()
    bench.reclaimer.evict_tokens(ROW, np.arange(4, 21))
    report = bench.step()
    assert (report.freed_empty_pages, report.submitted) == (4, 0)
    assert bench.memory.pool.free_pages() == free + 4
    assert bench.reclaimer.private_pages(ROW) == 6
    assert not bench.copies.copies
    assert bench.survivors_intact()
    assert bench.violations() == []


def test_repack_holds_destinations_until_the_commit(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.keep_every(4)
    seen, free = bench.seen(), bench.memory.pool.free_pages()
    report = bench.step()
    assert (report.submitted, report.submitted_tokens, report.taken_pages) == (1, 8, 2)
    assert bench.memory.pool.free_pages() == free - 2
    assert bench.reclaimer.held_pages() == 2
    assert bench.reclaimer.private_pages(ROW) == 10 + 2
    assert bench.seen() == seen
    assert bench.step().committed == 0
    bench.copies.copies[0].finish()
    assert bench.seen() == seen
    report = bench.step()
    assert (report.committed, report.moved_tokens, report.freed_source_pages) == (1, 8, 8)
    assert bench.reclaimer.private_pages(ROW) == 4
    assert bench.memory.pool.free_pages() == free + 6
    assert bench.seen() == seen
    assert bench.violations() == []


def test_compacted_tokens_keep_logical_order_in_their_pages(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.reclaimer.evict_tokens(ROW, [0, 1, 2, 9, 10, 11, 16, 17, 21, 22, 23])
    bench.step()
    plan = bench.reclaimer.copies.pending[ROW].plan
    assert (np.diff(plan.positions) > 0).all()
    bench.step_until_due()
    slots = bench.memory.rows[ROW].numpy()[plan.positions]
    assert slots.tolist() == plan.dst_slots.tolist()
    for page in plan.dst_pages.tolist():
        in_page = slots[slots // 4 == page]
        assert in_page.tolist() == list(range(page * 4, page * 4 + len(in_page)))


def test_a_partly_filled_compacted_page_is_compacted_again(make_bench: MakeBench) -> None:
    bench = make_bench(length=86, pages=60)
    for stride in (2, 4, 8, 16):
        bench.keep_every(stride)
        bench.step(pressure=True)
        bench.reclaimer.settle(1.0)
        bench.step(pressure=True)
        assert bench.survivors_intact()
        assert bench.violations() == []
    assert bench.table.live_len == 6 + 2
    assert bench.reclaimer.private_pages(ROW) == 2 + 1


def test_the_threshold_keeps_a_dense_row_and_pressure_does_not(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.reclaimer.evict_tokens(ROW, [1, 5, 9, 13])
    assert bench.step().submitted == 0
    assert bench.step(pressure=True).submitted == 1


def test_the_engines_reserve_is_left_alone(make_bench: MakeBench) -> None:
    bench = make_bench(length=38, pages=12)
    bench.keep_every(4)
    assert bench.memory.pool.free_pages() == 2
    assert bench.step(reserve_pages=2).submitted == 0
    report = bench.step(reserve_pages=1)
    assert (report.submitted, report.taken_pages) == (1, 1)
    report = bench.step_until_due()
    assert (report.freed_source_pages, report.submitted) == (4, 1)


def test_repacking_goes_on_step_by_step_with_one_free_page(make_bench: MakeBench) -> None:
    """A plan cut short by headroom does not wait for the hysteresis."""
    bench = make_bench(length=86, pages=23, hysteresis=0.5)
    bench.keep_every(4)
    for _ in range(12 * LAG):
        bench.step()
    assert bench.reclaimer.private_pages(ROW) == 6 + 1
    assert bench.survivors_intact()


def test_the_token_limit_spreads_a_repack_over_steps(make_bench: MakeBench) -> None:
    bench = make_bench(length=86, pages=60, max_moved_tokens=8, hysteresis=0.5)
    bench.keep_every(4)
    for _ in range(6 * LAG):
        assert bench.step().submitted_tokens <= 8
    assert bench.reclaimer.private_pages(ROW) == 6 + 1
    assert bench.survivors_intact()


def test_at_page_size_one_there_is_nothing_to_repack(make_bench: MakeBench) -> None:
    bench = make_bench(page_size=1, length=30, pages=40)
    bench.keep_every(3)
    report = bench.step(pressure=True)
    assert (report.freed_empty_pages, report.submitted) == (19, 0)
    assert bench.reclaimer.private_pages(ROW) == 11
    assert bench.violations() == []


def test_the_naive_arm_only_masks(make_bench: MakeBench) -> None:
    bench = make_bench(length=38, reclaim=False)
    free = bench.memory.pool.free_pages()
    bench.keep_every(8)
    report = bench.step(pressure=True)
    assert report.freed_empty_pages == report.submitted == 0
    assert bench.memory.pool.free_pages() == free
    assert bench.violations() == []
    assert len(bench.reclaimer.close(ROW)) == 10


def test_rows_left_out_are_not_touched(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.keep_every(8)
    report = bench.reclaimer.step(sealed_upto={}, pressure=True)
    assert report.freed_empty_pages == report.submitted == 0
    report = bench.reclaimer.step(sealed_upto={ROW: 12}, pressure=True)
    assert report.freed_empty_pages == 1


def test_tree_owned_tokens_are_masked_and_their_pages_kept(make_bench: MakeBench) -> None:
    bench = make_bench(length=38, protected=16)
    tree = (bench.memory.rows[ROW, :16:4] // 4).tolist()
    bench.reclaimer.evict_tokens(ROW, np.arange(24))
    report = bench.step()
    assert report.freed_empty_pages == 2
    assert bench.reclaimer.private_pages(ROW) == 4
    assert bench.table.live_len == 14
    assert bench.violations(tree) == []
    assert sorted(bench.reclaimer.close(ROW).tolist() + tree) != []
    assert not set(tree) & set(bench.memory.pool.free)


def test_close_returns_everything_the_tail_included(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.keep_every(4)
    bench.memory.grow(ROW, 38, 45)
    bench.reclaimer.sync_new_tokens(ROW, 45)
    bench.step()
    pages = bench.reclaimer.close(ROW)
    assert len(pages) == 12
    assert bench.reclaimer.table(ROW) is None
    assert bench.reclaimer.evicted_counts[ROW] == 0
    assert bench.reclaimer.private_pages(ROW) == 0
    assert len(bench.reclaimer.close(ROW)) == 0


def test_destinations_of_an_ended_request_are_held_until_due(
    make_bench: MakeBench,
) -> None:
    bench = make_bench(length=38)
    bench.keep_every(4)
    bench.step()
    copy = bench.copies.copies[0]
    held = set((copy.dst // 4).tolist())
    bench.memory.pool.release(bench.reclaimer.close(ROW))
    bench.memory.rows[ROW] = 0
    copy.finish()
    for _ in range(LAG - 1):
        bench.reclaimer.step(sealed_upto={})
        assert bench.reclaimer.held_pages() == bench.reclaimer.abandoned_pages() == 2
        assert not held & set(bench.memory.pool.free)
    assert bench.reclaimer.step(sealed_upto={}).dropped == 1
    assert held <= set(bench.memory.pool.free)
    assert bench.memory.pool.free_pages() == bench.memory.pool.total


def test_settle_commits_at_once_and_leaves_nothing_held(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.keep_every(4)
    bench.step()
    report = bench.reclaimer.settle(1.0)
    assert (report.committed, report.freed_source_pages, report.held_pages) == (1, 8, 0)
    assert bench.reclaimer.held_pages() == 0
    assert bench.reclaimer.private_pages(ROW) == 4
    assert bench.survivors_intact()


def test_a_failed_copy_is_raised_after_the_step_and_nothing_is_lost(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.keep_every(4)
    seen, free = bench.seen(), bench.memory.pool.free_pages()
    bench.step()
    bench.copies.copies[0].failed = True
    for _ in range(LAG - 1):
        bench.reclaimer.step(sealed_upto={})
    with pytest.raises(CopyFailedError):
        bench.reclaimer.step(sealed_upto={})
    assert bench.memory.pool.free_pages() == free
    assert bench.reclaimer.held_pages() == 0
    assert bench.seen() == seen
    assert bench.violations() == []
    assert bench.step().submitted == 1


def test_a_refused_submit_gives_the_destinations_back(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.keep_every(4)
    free = bench.memory.pool.free_pages()

    def refuse(*args: object) -> None:
        raise CopyFailedError("no")

    bench.copies.submit = refuse  # type: ignore[method-assign]
    with pytest.raises(CopyFailedError):
        bench.step()
    assert bench.memory.pool.free_pages() == free
    assert bench.violations() == []


def test_a_row_cannot_be_opened_twice_nor_with_an_evicted_page_start(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    with pytest.raises(InvariantError, match="row 1"):
        bench.reclaimer.open(ROW, Generation(4), object(), 0, 38)
    bench.memory.grow(2, 0, 12)
    bench.memory.rows[2, 4] = 0
    with pytest.raises(InvariantError, match="row 2"):
        bench.reclaimer.open(Row(2), Generation(1), RECORD, 0, 12)


def test_rows_that_can_return_the_most_pages_go_first() -> None:
    memory = MarkedRows(page_size=4, pages=40)
    reclaimer = Reclaimer(
        rows=RequestRows(memory.rows),
        buffers=memory.buffers,
        pool=memory.pool,
        copier=ManualCopyEngine(),
        settings=ReclaimSettings(),
    )
    for row, length in ((1, 22), (2, 62)):
        assert memory.grow(row, 0, length)
        reclaimer.open(Row(row), Generation(1), RECORD, 0, length)
        evicted = np.arange((length - 1) // 4 * 4)
        reclaimer.evict_tokens(Row(row), evicted[evicted % 4 != 0])
    spare = memory.pool.free_pages()
    report = reclaimer.step(sealed_upto={Row(1): 20, Row(2): 60}, reserve_pages=spare - 4)
    assert report.taken_pages == 4
    assert list(reclaimer.copies.pending) == [2]


@pytest.mark.parametrize("engine", [SyncCopyEngine, ThreadCopyEngine])
@pytest.mark.parametrize("page_size", [2, 16])
def test_steady_state_waste(engine: type, page_size: int) -> None:
    """Random evictions down to 30 %, one token at a time: waste after the last repack is below 5
    %."""
    memory = MarkedRows(page_size=page_size, pages=4000 // page_size, width=1300, layers=1)
    copier = engine()
    reclaimer = Reclaimer(
        rows=RequestRows(memory.rows),
        buffers=memory.buffers,
        pool=memory.pool,
        copier=copier,
        settings=ReclaimSettings(check=True),
    )
    length = 1024 + 1
    assert memory.grow(1, 0, length)
    written = memory.live(1, length)
    table = reclaimer.open(ROW, Generation(1), RECORD, 0, length)
    evicted = np.random.default_rng(0).permutation(1024)[: int(1024 * 0.7)]
    for start in range(0, len(evicted), 16):
        reclaimer.evict_tokens(ROW, evicted[start : start + 16])
        reclaimer.step(sealed_upto={ROW: 1024})
        # A copy in flight is committed with the holes of later evictions; the bound is for a
        # settled row.
        reclaimer.settle(10.0)
    reclaimer.step(sealed_upto={ROW: 1024}, pressure=True)
    assert reclaimer.settle(10.0).held_pages == 0
    assert table.sealed_waste() < 0.05
    assert all(written[pos] == digest for pos, digest in memory.live(1, length).items())
    assert reclaimer.violations(memory.pool.free_array()) == []
