"""The ends of a pruned request, and faults: every page goes back once, every fault is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.fake_engine import THINNED, FakeEngine, MakeEngine
from vtoken_sglang.engine.runtime import runtime as runtime_module
from vtoken_sglang.errors import InvariantError
from vtoken_sglang.policy.base import Policy, PolicyView


@pytest.mark.parametrize("page_size", [1, 16])
def test_release_frees_every_page_once(engine: MakeEngine, page_size: int) -> None:
    sim = engine(page_size, 1024 // page_size)
    request = sim.admit("a", 150, publish="never")
    sim.prefill(request)
    sim.cycle(request, count=42)
    sim.decode(request)
    request.kv.kv_committed_len -= 1  # a stop token: the last slot, a page of its own, is surplus
    assert request.kv.kv_committed_len == 192
    sim.finish(request)  # frees the row, then the surplus: the second call must free nothing
    free = sim.allocator.get_all_free_pages()
    assert len(free.unique()) == len(free)
    assert sim.allocator.available_size() == sim.total
    sim.runtime.health.idle(sim.runtime.states.values())


def test_a_copy_in_flight_outlives_its_request(engine: MakeEngine) -> None:
    sim = engine(**THINNED, budget=None)
    request = sim.admit("a", 160, publish="never")
    sim.prefill(request)
    sim.decode(request)
    sim.safe_point()
    (copy,) = sim.copies.waiting
    held = sim.runtime.describe()["held_pages"]
    assert held > 0
    sim.finish(request)
    assert sim.runtime.orphaned_tokens() == held * 16
    assert sim.allocator.available_size() == sim.total - held * 16
    assert sim.accounted() == sim.total
    other = sim.admit("b", 300, policy="none")
    sim.prefill(other)
    copy.finish()  # late: it may not hit a page that anyone else got
    assert len(sim.seen(other)) == 300
    sim.until_due()
    assert sim.runtime.orphaned_tokens() == 0
    assert sim.accounted() == sim.total


def test_retraction_forgets_every_eviction(engine: MakeEngine) -> None:
    sim = engine()
    request = sim.admit("a", 100, publish="never")
    sim.prefill(request)
    sim.cycle(request, count=20)
    assert len(sim.seen(request)) < 70
    sim.retract(request)
    assert sim.allocator.available_size() == sim.total
    sim.enter(request)
    sim.extend(request, 120)
    sim.running.append(request)
    sim.safe_point(last=[request])
    assert len(sim.seen(request)) == 120
    sim.cycle(request, count=3)
    assert len(sim.seen(request)) < 70
    assert sim.accounted() == sim.total


def test_a_reused_row_knows_nothing_of_the_request_before(engine: MakeEngine) -> None:
    sim = engine()
    first = sim.admit("first", 150, publish="never")
    sim.prefill(first)
    sim.cycle(first, count=10)
    row = first.kv.req_pool_idx
    sim.finish(first)
    second = sim.admit("second", 60, policy="none")
    assert second.kv.req_pool_idx == row
    sim.prefill(second)
    sim.cycle(second, count=10)
    assert len(sim.seen(second)) == 70
    sim.finish(second)
    assert sim.allocator.available_size() == sim.total


class Failing(Policy):
    """Scores once, then raises; or returns what is no score."""

    def __init__(self, later: object) -> None:
        self.later, self.calls = later, 0

    def score(self, view: PolicyView) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            return view.positions.float()
        if isinstance(self.later, Exception):
            raise self.later
        return self.later * view.positions.float()  # type: ignore[operator,no-any-return]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], Failing]:
    """Make `random` a policy that fails from its second look on."""
    known = runtime_module.load_policy

    def install(later: object) -> Failing:
        policy = Failing(later)
        monkeypatch.setattr(
            runtime_module,
            "load_policy",
            lambda name, *own: policy if name == "random" else known(name, *own),
        )
        return policy

    return install


@pytest.mark.parametrize("later", [ValueError("no such layer"), float("nan")])
def test_a_policy_that_fails_ends_its_request_alone(
    engine: MakeEngine,
    failing: Callable[[object], Failing],
    caplog: pytest.LogCaptureFixture,
    later: object,
) -> None:
    policy = failing(later)
    sim = engine()
    broken = sim.admit("broken", 100, publish="never", policy="random")
    whole = sim.admit("whole", 100, publish="never")
    for request in (broken, whole):
        sim.prefill(request)
    while broken.to_finish is None:
        sim.cycle(broken, whole)
        assert policy.calls < 3
    assert policy.calls == 2
    told = broken.to_finish.to_json()
    assert (told["type"], told["status_code"], told["err_type"]) == ("abort", 500, "PolicyError")
    assert told["message"].startswith("policy Failing: scores must be")
    assert "request broken was ended: policy Failing" in caplog.text
    sim.cycle(broken, whole)  # the step in flight; nobody asks the policy again
    assert policy.calls == 2
    sim.finish(broken)
    sim.cycle(whole, count=20)
    assert whole.to_finish is None
    assert len(sim.seen(whole)) < 70
    assert sim.runtime.describe()["policy_errors"] == 1
    sim.finish(whole)
    assert sim.allocator.available_size() == sim.total
    sim.runtime.health.idle(sim.runtime.states.values())


def test_a_policy_that_fails_between_chunks_stops_the_prompt(
    engine: MakeEngine, failing: Callable[[object], Failing]
) -> None:
    """Unpruned, the rest of a prompt may not fit; SGLang takes the chunked request out at once."""
    policy = failing(ValueError("no such layer"))
    sim = engine(8, 64)
    request = sim.admit("a", 400, publish="never", policy="random")
    sim.scheduler.chunked_req = request
    sim.scheduler._pending_chunked_abort_req = None
    for end in (112, 224, 336):  # multiples of its interval
        sim.extend(request, end)
        sim.safe_point()
    assert policy.calls == 2
    assert request.to_finish is None
    assert sim.scheduler._pending_chunked_abort_req is request
    told = request.discard_output_reason.to_json()  # type: ignore[attr-defined]
    assert told["status_code"] == 500
    assert "no such layer" in told["message"]
    sim.scheduler.chunked_req = None
    sim.finish(request)
    assert sim.allocator.available_size() == sim.total
    sim.runtime.health.idle(sim.runtime.states.values())


def test_a_request_that_its_client_aborted_is_pruned_to_the_end(engine: MakeEngine) -> None:
    """It may be retracted before it ends, and is then computed once more."""
    sim = engine()
    request = sim.admit("a", 150, publish="never")
    request.to_finish = object()
    sim.prefill(request)
    sim.cycle(request, count=5)
    assert len(sim.seen(request)) < 100


def test_draining_counts_what_it_committed(engine: MakeEngine) -> None:
    """A flush that is refused because requests run has waited for their copies all the same."""
    sim = engine(**THINNED, budget=None)
    request = sim.admit("a", 160, publish="never")
    sim.prefill(request)
    sim.decode(request)
    sim.safe_point()
    assert sim.copies.waiting
    sim.runtime.drain()
    assert sim.runtime.describe()["held_pages"] == 0
    assert sim.accounted() == sim.total
    assert sim.seen(request)


# -- faults: each must be noticed -----------------------------------------------------------------


def pruned(sim: FakeEngine) -> Any:
    request = sim.admit("a", 150, publish="never")
    sim.prefill(request)
    sim.cycle(request, count=3)
    return request


def test_a_row_freed_while_its_ledger_holds_pages(engine: MakeEngine) -> None:
    sim = engine()
    request = pruned(sim)
    with pytest.raises(InvariantError, match="while its ledger still holds pages"):
        sim.runtime.forget_row(request.kv.req_pool_idx)


def test_state_left_when_the_server_is_idle(engine: MakeEngine) -> None:
    sim = engine()
    request = pruned(sim)
    with pytest.raises(InvariantError, match=rf"rows \[{request.kv.req_pool_idx}\] are left"):
        sim.runtime.health.idle(sim.runtime.states.values())


def test_pages_left_when_the_server_is_idle(engine: MakeEngine) -> None:
    sim = engine(**THINNED, budget=None)
    request = sim.admit("a", 160, publish="never")
    sim.prefill(request)
    sim.decode(request)
    sim.safe_point()
    sim.finish(request)
    with pytest.raises(InvariantError, match=r"idle, but [1-9]\d* held pages"):
        sim.runtime.health.idle(sim.runtime.states.values())
    sim.runtime.drain()
    sim.runtime.health.idle(sim.runtime.states.values())


def test_a_page_freed_behind_the_ledgers_back(engine: MakeEngine) -> None:
    sim = engine()
    request = pruned(sim)
    start = sim.rows.req_to_token[request.kv.req_pool_idx, 128:129].long()
    sim.allocator.free_page_ids(start // 16)
    with pytest.raises(InvariantError, match="claimed more than once"):
        sim.safe_point()


def test_an_evicted_entry_that_was_not_zeroed(engine: MakeEngine) -> None:
    sim = engine()
    request = pruned(sim)
    evicted = next(pos for pos in range(150) if pos not in sim.seen(request))
    sim.rows.req_to_token[request.kv.req_pool_idx, evicted] = 40 * 16 + evicted % 16
    with pytest.raises(InvariantError, match="evicted positions with a slot in the row"):
        sim.safe_point()


def test_a_torn_copy_is_dropped_and_reported(engine: MakeEngine) -> None:
    sim = engine(**THINNED, budget=None)
    request = sim.admit("a", 160, publish="never")
    sim.prefill(request)
    sim.decode(request)
    sim.safe_point()
    (copy,) = sim.copies.waiting
    copy.run_one_buffer()
    copy.over = True
    with pytest.raises(InvariantError, match="corrupt copy"):
        sim.until_due()
    assert sim.seen(request)  # it still lives where it was


def test_a_row_that_changed_hands_during_a_copy(engine: MakeEngine) -> None:
    sim = engine(**THINNED, budget=None)
    request = sim.admit("a", 160, publish="never")
    sim.prefill(request)
    sim.decode(request)
    sim.safe_point()
    sim.rows.req_generation[request.kv.req_pool_idx] += 1
    sim.until_due()
    state = sim.runtime.describe()
    assert (state["repacks"], state["dropped_plans"]) == (0, 1)
    assert sim.seen(request)


def test_a_copy_that_never_ends(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = engine(**THINNED, budget=None)
    request = sim.admit("a", 160, publish="never")
    sim.prefill(request)
    sim.decode(request)
    sim.safe_point()
    monkeypatch.setattr(type(sim.copies.waiting[0]), "wait", lambda *_: False)
    with pytest.raises(InvariantError, match="did not finish"):
        sim.runtime.drain()
