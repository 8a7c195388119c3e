"""Several requests that fork one prefix, at different times, under pressure, over small budgets."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from tests.engine.sharing.test_forks import (
    PREFIX,
    MakeEngine,
    admitted,
    cached,
    engine,  # noqa: F401  (a fixture)
    evict,
)
from tests.helpers.prefix_engine import TreeRequest


def test_samples_of_one_prompt_fork_it_one_after_the_other(engine: MakeEngine) -> None:  # noqa: F811
    """n = 3: each sample lives on the same cached prompt; the last to fork releases it."""
    sim = engine()
    samples: list[TreeRequest] = []
    forked_at: dict[str, int] = {}
    for turn in range(16):
        if turn in (0, 1, 8):  # the third is still to look when the others have left
            name = f"sample{len(samples)}"
            samples.append(admitted(sim, name, PREFIX, shared="cow", seed=turn))
            if turn == 1:
                continue
        sim.steps(1)
        for sample in samples:
            if not sample.fresh and not sample.kv.cache_protected_len:
                forked_at.setdefault(sample.rid, turn)
        if turn >= 2:
            held = any(sample.kv.cache_protected_len for sample in samples)
            assert (sim.tree.evictable_size() >= 96) == (not held), turn
        assert sim.accounted() == sim.total
    assert forked_at["sample0"] < forked_at["sample1"] < 8 < forked_at["sample2"], forked_at
    log = sim.runtime.describe()["forks"]["log"]
    assert [entry["rid"] for entry in log] == [sample.rid for sample in samples]
    assert [entry["realised_pages"] > 0 for entry in log] == [False, True, True]
    evict(sim, sim.tree.evictable_size())
    seen = [sim.seen(sample) for sample in samples]
    assert seen[0] != seen[1] != seen[2]
    for sample in samples:
        sim.finish(sample)
    assert sim.accounted() == sim.total


def test_a_hit_longer_than_the_budget_is_pruned_to_it(engine: MakeEngine) -> None:  # noqa: F811
    sim = engine(keep=None, budget=48)
    first = admitted(sim, "first", PREFIX, policy="none")
    sim.steps(1)
    sim.finish(first)
    request = admitted(sim, "a", [*PREFIX, *range(10, 30)], shared="cow")
    assert request.prefix_len == 96
    sim.steps(4)
    assert request.kv.cache_protected_len == 0
    assert 48 <= len(sim.seen(request)) <= 48 + 3 + sim.page_size
    assert cached(sim, PREFIX) == 96
    assert sim.accounted() == sim.total


def test_under_pressure_sharers_that_all_prune_fork_a_hot_prefix(engine: MakeEngine) -> None:  # noqa: F811
    sim = engine(keep=0.2)
    pair = [
        admitted(sim, name, [*PREFIX, *range(at * 50, at * 50 + 3)], shared="auto", seed=at)
        for at, name in enumerate("ab")
    ]
    sim.steps(2)
    assert all(request.kv.cache_protected_len >= 96 for request in pair), "memory is not short"
    ballast = [
        admitted(sim, f"ballast{at}", [3000 + 500 * at + i for i in range(430)], policy="none")
        for at in range(3)
    ]
    sim.steps(4)
    assert all(request.kv.cache_protected_len < 96 for request in pair)
    decisions = sim.runtime.describe()["forks"]["decisions"]
    assert decisions["auto: nothing gained"] > 0
    assert decisions["auto: pays"] == 2
    for request in (*pair, *ballast):
        assert sim.seen(request)
        sim.finish(request)
    assert sim.accounted() == sim.total
