"""A copy of an ended request is settled before SGLang counts or resets the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.prefix_engine import PrefixEngine
from vtoken_sglang.engine.hooks import scheduler as scheduler_hooks
from vtoken_sglang.errors import InvariantError
from vtoken_sglang.options import VTokenConfig

PROMPT = list(range(1000, 1096))


@pytest.fixture(params=["python-16", "rust-16", "python-1", "rust-1"])
def sim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefixEngine:
    """A pool where the copy of a fork hangs in the air: its request was retracted meanwhile."""
    core, size = request.param.split("-")
    config = VTokenConfig(
        policy="random", keep=0.4, sink=0, recent=8, interval=1, shared="cow", check=True
    )
    pages = 1600 // int(size)
    sim = PrefixEngine(monkeypatch, config, page_size=int(size), pages=pages, core=core)
    retracted = sim.admit("a", PROMPT)
    assert retracted is not None
    sim.step()
    sim.safe_point()
    (copy,) = sim.copies.waiting
    assert not copy.over
    sim.retract(retracted)
    return sim


def free_and_evictable(sim: PrefixEngine) -> int:
    return int(sim.allocator.available_size()) + int(sim.tree.evictable_size())


def watcher(sim: PrefixEngine, answer: Any) -> tuple[Callable[..., Any], list[Any]]:
    """SGLang's own method: what it was called with, and what the pool looked like then."""
    calls: list[Any] = []

    def stock(*arguments: Any, **options: Any) -> Any:
        orphaned = sim.runtime.orphaned_tokens()
        calls.append((arguments, options, orphaned, free_and_evictable(sim)))
        return answer

    return stock, calls


def test_a_copy_in_the_air_is_missing_from_the_pool(sim: PrefixEngine) -> None:
    """What the hooks are for: without them the pool does not add up."""
    assert sim.runtime.orphaned_tokens() > 0
    assert free_and_evictable(sim) == sim.total - sim.runtime.orphaned_tokens()
    with pytest.raises(InvariantError, match="held pages"):
        sim.runtime.health.idle(sim.runtime.states.values())


def test_a_flush_comes_after_the_copy(sim: PrefixEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, calls = watcher(sim, answer=True)
    cleared: list[int] = []
    monkeypatch.setattr(
        sim.runtime.observer.prefix_scores, "clear", lambda: cleared.append(len(calls))
    )
    assert scheduler_hooks.drain_before_flush(stock, sim.scheduler, "all", empty_cache=False)
    assert calls == [((sim.scheduler, "all"), {"empty_cache": False}, 0, sim.total)]
    assert cleared == [0], "kept scores belong to the prefixes that are flushed"
    sim.runtime.health.idle(sim.runtime.states.values())


def test_the_idle_check_comes_after_the_copy(sim: PrefixEngine) -> None:
    stock, calls = watcher(sim, answer="idle")
    assert scheduler_hooks.drain_when_idle(stock, sim.scheduler) == "idle"
    assert calls == [((sim.scheduler,), {}, 0, sim.total)]


def test_a_scheduler_with_requests_is_drained_but_not_called_idle(sim: PrefixEngine) -> None:
    other = sim.admit("b", list(range(5000, 5040)))
    assert other is not None
    sim.steps(2)
    stock, calls = watcher(sim, answer=None)
    scheduler_hooks.drain_when_idle(stock, sim.scheduler)  # a running request is no error
    assert [orphaned for _, _, orphaned, _ in calls] == [0]
    assert sim.accounted() == sim.total


def test_a_flush_that_sglang_refuses_commits_nothing(sim: PrefixEngine) -> None:
    """A forward may be reading the rows."""
    running = sim.admit("b", [*PROMPT, 7], policy="none")
    assert running is not None
    for copy in sim.copies.waiting:
        copy.finish()
    held = sim.runtime.orphaned_tokens()
    stock, calls = watcher(sim, False)
    assert scheduler_hooks.drain_before_flush(stock, sim.scheduler) is False
    assert held == calls[0][2] > 0
    sim.finish(running)
