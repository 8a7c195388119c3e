"""When a copy is committed follows from the calls alone, whenever it happens to be over."""

import pytest

from tests.core.conftest import ROW, MakeBench
from vtoken_sglang.core.types import LAG
from vtoken_sglang.errors import InvariantError


@pytest.mark.parametrize("over_before", [*range(1, LAG + 1), None])
def test_the_commit_comes_lag_steps_later(make_bench: MakeBench, over_before: int | None) -> None:
    """Over early, just in time, or only when it is waited for."""
    bench = make_bench(length=38)
    bench.keep_every(4)
    assert bench.step().submitted == 1
    committed = []
    for step in range(1, LAG + 1):
        if step == over_before:
            bench.copies.copies[0].finish()
        committed.append(bench.step().committed)
    assert committed == [*[0] * (LAG - 1), 1]
    assert bench.survivors_intact()


def test_a_fork_belongs_to_the_step_that_follows_it(make_bench: MakeBench) -> None:
    bench = make_bench(length=70, pages=60, protected=40)
    bench.keep_every(3)
    bench.reclaimer.step(sealed_upto={})
    bench.reclaimer.fork(ROW, 20)
    assert [bench.step().forked for _ in range(LAG + 1)] == [*[()] * LAG, ((ROW, 20),)]


def test_a_settled_copy_is_not_committed_again(make_bench: MakeBench) -> None:
    bench = make_bench(length=38)
    bench.keep_every(4)
    bench.step()
    assert bench.reclaimer.settle(1.0).committed == 1
    assert [bench.step().committed for _ in range(LAG + 1)] == [0] * (LAG + 1)
    assert bench.violations() == []


def test_a_copy_that_never_ends_is_named_and_changes_nothing(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(length=38)
    bench.keep_every(4)
    bench.step()
    monkeypatch.setattr(bench.copies.copies[0], "wait", lambda timeout: False)
    seen = bench.seen()
    with pytest.raises(InvariantError, match="row 1: a copy did not finish in 30"):
        bench.step_until_due()
    with pytest.raises(InvariantError, match="row 1: a copy did not finish in 0.5 s"):
        bench.reclaimer.settle(0.5)
    assert (bench.seen(), bench.reclaimer.held_pages()) == (seen, 2)
    assert bench.violations() == []
