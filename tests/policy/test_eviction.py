"""How many tokens die and which: properties over arbitrary states, and refusal of bad scores."""

from __future__ import annotations

from dataclasses import replace
from decimal import ROUND_CEILING, Decimal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy.base import Policy, PolicyError, PolicyView
from vtoken_sglang.policy.eviction import choose_evicted, due, target_kept
from vtoken_sglang.policy.registry import load_policy

BASE = RequestOptions.resolve(VTokenConfig(policy="random", budget=64), None)


class TableScore(Policy):
    """Scores looked up by position, so that ties and orders can be chosen."""

    def __init__(self, table: NDArray[np.float32]) -> None:
        self.table = torch.from_numpy(table)

    def score(self, view: PolicyView) -> torch.Tensor:
        return self.table[view.positions]


class Returns(Policy):
    def __init__(self, result: object) -> None:
        self.result = result

    def score(self, view: PolicyView) -> torch.Tensor:
        return self.result  # type: ignore[return-value]


@st.composite
def states(draw: st.DrawFn) -> tuple[NDArray[np.int64], int, RequestOptions, int, TableScore]:
    logical_len = draw(st.integers(1, 120))
    alive = draw(st.lists(st.booleans(), min_size=logical_len, max_size=logical_len))
    keep = draw(st.none() | st.sampled_from([0.01, 0.1, 0.3, 0.5, 0.7, 1.0]))
    options = replace(
        BASE,
        keep=keep,
        budget=draw(st.integers(1, 130)) if keep is None else None,
        sink=draw(st.integers(0, 12)),
        recent=draw(st.integers(0, 40) | st.sampled_from([0.07, 0.29, 0.5, 0.99])),
    )
    eligible_below = draw(st.integers(0, logical_len + 5))
    # Few distinct values, so that ties are common.
    table = draw(st.lists(st.integers(0, 5), min_size=logical_len, max_size=logical_len))
    live = np.flatnonzero(np.array(alive, dtype=bool)).astype(np.int64)
    policy = TableScore(np.array(table, dtype=np.float32))
    return live, logical_len, options, eligible_below, policy


def reference_target(options: RequestOptions, logical_len: int) -> int:
    if options.budget is not None:
        return options.budget
    exact = Decimal(str(options.keep)) * logical_len
    return int(exact.to_integral_value(rounding=ROUND_CEILING))


@settings(deadline=None)
@given(states())
def test_evicted_match_a_plain_reference(
    state: tuple[NDArray[np.int64], int, RequestOptions, int, TableScore],
) -> None:
    live, logical_len, options, eligible_below, policy = state
    before = live.copy()
    evicted = choose_evicted(
        policy,
        live_positions=live,
        logical_len=logical_len,
        options=options,
        eligible_below=eligible_below,
    )
    assert np.array_equal(live, before)
    assert evicted.dtype == np.int64
    recent = options.recent
    if isinstance(recent, float):
        recent = int(Decimal(str(recent)) * reference_target(options, logical_len))
    candidates = [
        pos
        for pos in live.tolist()
        if options.sink <= pos < logical_len - recent and pos < eligible_below
    ]
    count = min(len(candidates), max(0, len(live) - reference_target(options, logical_len)))
    order = sorted(candidates, key=lambda pos: (float(policy.table[pos]), pos))
    assert evicted.tolist() == sorted(order[:count])


@settings(deadline=None)
@given(states(), st.integers(0, 60))
def test_a_smaller_budget_evictions_a_superset(
    state: tuple[NDArray[np.int64], int, RequestOptions, int, TableScore], less: int
) -> None:
    live, logical_len, options, eligible_below, policy = state
    large = replace(options, keep=None, budget=100)
    small = replace(large, budget=100 - less)

    def evicted(chosen: RequestOptions) -> set[int]:
        evicted = choose_evicted(
            policy,
            live_positions=live,
            logical_len=logical_len,
            options=chosen,
            eligible_below=eligible_below,
        )
        return set(evicted.tolist())

    assert evicted(large) <= evicted(small)


@settings(deadline=None)
@given(states())
def test_a_second_look_evictions_nothing_more(
    state: tuple[NDArray[np.int64], int, RequestOptions, int, TableScore],
) -> None:
    live, logical_len, options, eligible_below, policy = state

    def look(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return choose_evicted(
            policy,
            live_positions=positions,
            logical_len=logical_len,
            options=options,
            eligible_below=eligible_below,
        )

    assert look(np.setdiff1d(live, look(live))).size == 0


def test_no_pruning_evictions_nothing_and_asks_no_policy() -> None:
    options = replace(BASE, policy="none", budget=None)
    evicted = choose_evicted(
        Returns(None),
        live_positions=np.arange(500),
        logical_len=500,
        options=options,
        eligible_below=500,
    )
    assert evicted.size == 0
    assert not due(options, 0, 10_000)


def test_no_live_token_is_no_error() -> None:
    evicted = choose_evicted(
        load_policy("random"),
        live_positions=np.empty(0, dtype=np.int64),
        logical_len=10,
        options=BASE,
        eligible_below=10,
    )
    assert evicted.size == 0


@pytest.mark.parametrize(
    ("keep", "logical_len", "expected"),
    [(0.1, 30, 3), (0.3, 10, 3), (0.7, 10, 7), (0.3, 11, 4), (1.0, 9, 9), (0.001, 1, 1)],
)
def test_keep_is_the_decimal_that_was_written(keep: float, logical_len: int, expected: int) -> None:
    assert target_kept(replace(BASE, budget=None, keep=keep), logical_len) == expected


def test_due_waits_for_interval_new_tokens() -> None:
    options = replace(BASE, interval=16)
    assert [due(options, 100, length) for length in (100, 115, 116, 117)] == [
        False,
        False,
        True,
        True,
    ]
    assert due(options, 0, 16)


def test_the_policy_cannot_reach_the_callers_positions() -> None:
    class Vandal(Policy):
        def score(self, view: PolicyView) -> torch.Tensor:
            view.positions.zero_()
            return torch.zeros(len(view.positions))

    live = np.arange(200)
    live.flags.writeable = False
    evicted = choose_evicted(
        Vandal(), live_positions=live, logical_len=200, options=BASE, eligible_below=200
    )
    assert live.tolist() == list(range(200))
    assert evicted.tolist() == list(range(4, 140))


@pytest.mark.parametrize(
    ("result", "rule"),
    [
        ([1.0] * 200, "must be a tensor"),
        (torch.zeros(199), "must have shape"),
        (torch.zeros(200, 1), "must have shape"),
        (torch.zeros(200, dtype=torch.float64), "must be float32"),
        (torch.zeros(200).to_sparse(), "must be a dense tensor"),
        (torch.zeros(200, device="meta"), "must be on cpu"),
        (torch.full((200,), float("nan")), "must be finite"),
        (torch.cat((torch.zeros(199), torch.tensor([float("-inf")]))), "must be finite"),
    ],
)
def test_bad_scores_are_refused_with_the_policys_name(result: object, rule: str) -> None:
    with pytest.raises(PolicyError, match=rule) as caught:
        choose_evicted(
            Returns(result),
            live_positions=np.arange(200),
            logical_len=200,
            options=BASE,
            eligible_below=200,
        )
    assert caught.value.policy == "Returns"


def test_an_error_that_cannot_show_itself_is_told_by_its_class() -> None:
    class Mute(Exception):
        def __repr__(self) -> str:
            raise ValueError

    assert str(PolicyError(object(), "must be", Mute())).endswith("got a Mute")


def test_a_policys_own_error_is_told_with_its_name() -> None:
    class Broken(Policy):
        def score(self, view: PolicyView) -> torch.Tensor:
            raise KeyError(f"no weight at {view.logical_len}")

    with pytest.raises(PolicyError, match="policy Broken: .* KeyError.*no weight at 200") as caught:
        choose_evicted(
            Broken(), live_positions=np.arange(200), logical_len=200, options=BASE,
            eligible_below=200,
        )  # fmt: skip
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("live", [[1, 0], [0, 0], [-1, 5], [0, 200]])
def test_a_callers_wrong_positions_are_noticed(live: list[int]) -> None:
    options = replace(BASE, budget=1, sink=0, recent=0)
    with pytest.raises(AssertionError):
        choose_evicted(
            load_policy("random"),
            live_positions=np.array(live, dtype=np.int64),
            logical_len=100,
            options=options,
            eligible_below=100,
        )
