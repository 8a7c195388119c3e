"""Below the repack trigger, pages whose tokens fit into one are merged."""

from tests.core.conftest import ROW, MakeBench


def test_below_the_threshold_two_pages_that_fit_into_one_are_merged(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.reclaimer.evict_tokens(ROW, [1, 2, 3, 5, 6])
    report = bench.step()
    assert (report.submitted, report.submitted_tokens, report.taken_pages) == (1, 3, 1)
    report = bench.step_until_due()
    assert (report.committed, report.freed_source_pages) == (1, 2)
    assert bench.survivors_intact()
    assert bench.violations() == []


def test_a_merge_is_tried_once_per_change(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.reclaimer.evict_tokens(ROW, [1, 2, 3, 5, 6])
    assert bench.step(reserve_pages=bench.memory.pool.free_pages()).submitted == 0
    assert bench.step().submitted == 0
    bench.reclaimer.evict_tokens(ROW, [7])
    assert bench.step().submitted == 1


def test_without_merges_only_the_threshold_counts(make_bench: MakeBench) -> None:
    bench = make_bench(length=38, merge=False)
    bench.reclaimer.evict_tokens(ROW, [1, 2, 3, 5, 6])
    assert bench.step().submitted == 0
