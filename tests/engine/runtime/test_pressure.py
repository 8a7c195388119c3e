"""A pool that is nearly full is repacked below the trigger, too; one that is not is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.fake_engine import FakeEngine, FakeRequest, MakeEngine
from vtoken_sglang.engine.runtime import runtime as runtime_module
from vtoken_sglang.policy.base import Policy, PolicyView

PAGE, PAGES, PROMPT = 16, 64, 128
# Three of the eight sealed pages keep 10 tokens: waste 18 / 128 is below the trigger of 0.25, no
# two of them fit into one page, so nothing is merged, but all three fit into two.
EVICTED = [page * PAGE + offset for page in range(3) for offset in range(6)]
LIVE = [pos for pos in range(PROMPT) if pos not in EVICTED]


class Pick(Policy):
    """The tokens above score lowest."""

    def score(self, view: PolicyView) -> torch.Tensor:
        return 1.0 - torch.isin(view.positions, torch.tensor(EVICTED)).float()


@pytest.fixture
def pick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "load_policy", lambda *_: Pick())


def pool_with(engine: MakeEngine, free: int, **settings: Any) -> tuple[FakeEngine, FakeRequest]:
    """A request that loses its evicted at the next safe point, and `free` pages left besides what
    requests that are not pruned hold."""
    sim = engine(PAGE, PAGES, **settings)
    once = {"budget": PROMPT + 1 - len(EVICTED), "sink": 0, "recent": 0, "interval": PROMPT}
    request = sim.admit("thinned", PROMPT, publish="never", **once)
    sim.prefill(request)
    sim.decode(request)
    filling = PAGES - (PROMPT // PAGE + 1) - free
    for number, pages in enumerate((filling // 2, filling - filling // 2)):
        sim.prefill(sim.admit(f"filler {number}", pages * PAGE, policy="none"))
    assert sim.allocator.available_size() == free * PAGE
    return sim, request


def repacks(sim: FakeEngine) -> int:
    """Repacks of one safe point that were committed when due."""
    sim.safe_point()
    sim.until_due()
    state = sim.runtime.describe()
    assert state["evicted_tokens"] == len(EVICTED)
    assert state["early_evictions"] == 0, "there is a page for each running request"
    assert sim.accounted() == sim.total
    found: int = state["repacks"]
    return found


@pytest.mark.usefixtures("pick")
def test_under_pressure_a_row_below_the_trigger_is_repacked(engine: MakeEngine) -> None:
    free = PAGES // 8 - 1
    sim, request = pool_with(engine, free)
    assert repacks(sim) == 1
    assert sim.allocator.available_size() == (free + 1) * PAGE
    assert sim.seen(request) == [*LIVE, PROMPT]


@pytest.mark.usefixtures("pick")
@pytest.mark.parametrize("free", [PAGES // 8, PAGES // 2])
def test_without_pressure_it_is_left_where_it_is(engine: MakeEngine, free: int) -> None:
    sim, request = pool_with(engine, free)
    assert repacks(sim) == 0
    assert sim.allocator.available_size() == free * PAGE
    assert sim.seen(request) == [*LIVE, PROMPT]


@pytest.mark.usefixtures("pick")
def test_above_the_trigger_no_pressure_is_needed(engine: MakeEngine) -> None:
    """So the row above was left alone for its waste, not for want of a gain."""
    sim, _ = pool_with(engine, PAGES // 2, repack_threshold=0.1)
    assert repacks(sim) == 1
