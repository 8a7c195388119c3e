"""SGLang's own `PrefillAdder` asks a budget that knows which request it is about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from tests.helpers.admission import TREE, budget_of, waiting
from tests.helpers.fake_engine import FakeEngine, FakeRequest, MakeEngine
from tests.helpers.storm import Adder
from vtoken_sglang.engine.hooks import admission as capacity_hooks


def adder_of(sim: FakeEngine, *, cache: bool) -> Adder:
    """An admission pass with the prefix cache on or off."""
    tree = SimpleNamespace(
        **vars(TREE),
        disable=not cache,
        lock=lambda _node: None,
        unlock=lambda _lock: None,
        supports_prefix_sharing=lambda: cache,
    )
    adder = Adder(sim.page_size, tree, sim.allocator, None, 0.5, 1 << 30, 512)
    adder.memory_budget = budget_of(sim)
    return adder


def add(adder: Adder, request: FakeRequest) -> AddReqResult:
    found: AddReqResult = capacity_hooks.add_waiting(Adder.add_one_req, adder, request, False, None)
    return found


class Untouchable(SimpleNamespace):
    """Sampling parameters that nobody may change."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"{name} was set to {value}")


def fixed_length(sim: FakeEngine, rid: str, prompt: int, new: int) -> FakeRequest:
    request: Any = waiting(sim, rid, prompt, new, publish="never")
    request.last_node, request.host_hit_length = None, 0
    request.swa_host_hit_length = request.auxiliary_swa_host_hit_length = 0
    request.retracted_stain, request.needs_host_load_back = False, lambda: False
    request.extend_len = prompt
    request.sampling_params = Untouchable(**{**vars(request.sampling_params), "ignore_eos": True})
    found: FakeRequest = request
    return found


@pytest.mark.parametrize("cache", [True, False])
def test_requests_of_fixed_length_are_charged_what_they_hold(
    engine: MakeEngine, cache: bool
) -> None:
    """With the cache off SGLang plays their growth through instead, as if nothing of it came back.
    Neither the requests nor the adder are changed by it."""
    sim = engine(pages=32)  # 512 tokens; each request grows to 416 and holds 96
    adder = adder_of(sim, cache=cache)
    budget, tree = adder.memory_budget, adder.tree_cache
    requests = [fixed_length(sim, f"{n}", 16, 400) for n in range(6)]
    found = [add(adder, request) for request in requests]
    assert found == [*[AddReqResult.CONTINUE] * 5, AddReqResult.NO_TOKEN]
    assert adder.can_run_list == requests[:5]
    assert (adder.memory_budget, adder.tree_cache) == (budget, tree)
    stock = adder_of(sim, cache=cache)
    stock.memory_budget = PrefillBudget(sim.allocator, TREE)
    alone, *others = [stock.add_one_req(request, False, None) for request in requests]
    assert alone is AddReqResult.CONTINUE
    assert set(others) == {AddReqResult.NO_TOKEN}


def test_an_error_leaves_the_adder_its_budget(engine: MakeEngine) -> None:
    sim = engine(pages=32)
    adder = adder_of(sim, cache=False)
    budget, tree = adder.memory_budget, adder.tree_cache

    def fails(*_: object) -> None:
        assert adder.memory_budget is not budget
        raise RuntimeError("as SGLang may")

    for hook, rest in (
        (capacity_hooks.add_waiting, (False, None)),
        (capacity_hooks.add_chunked, ()),
    ):
        with pytest.raises(RuntimeError, match="as SGLang may"):
            hook(fails, adder, fixed_length(sim, "a", 16, 16), *rest)
        assert (adder.memory_budget, adder.tree_cache) == (budget, tree)
