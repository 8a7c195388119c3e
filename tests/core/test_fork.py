"""The copy-on-write cost rule: hand-worked cases, and a brute-force reading of its formula."""

from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken_sglang.core.fork import ForkCase, decide_fork, fork_curves

PAGE = 16


def case(
    live: list[int], holders: list[int], pruning: list[int] | None = None, **changes: object
) -> ForkCase:
    fields: dict[str, object] = {
        "page_size": PAGE,
        "free_pages": 1000,
        "reserve_pages": 0,
        "pressure": False,
        "remaining": 1000,
    }
    return ForkCase(
        live=np.array(live, np.int64),
        holders=np.array(holders, np.int64),
        pruning_holders=np.array(holders if pruning is None else pruning, np.int64),
        **(fields | changes),  # type: ignore[arg-type]
    )


def test_last_holder_forks_what_only_it_holds() -> None:
    decision = decide_fork(case([5] * 10, [8] * 4 + [1] * 6))
    assert (decision.first_page, decision.cost_pages, decision.released_pages) == (4, 2, 6.0)
    assert decision.moved_tokens == 30


@pytest.mark.parametrize("pressure", [False, True])
def test_hot_prefix_with_a_holder_that_never_prunes_stays_masked(pressure: bool) -> None:
    decision = decide_fork(case([5] * 10, [8] * 10, [7] * 10, pressure=pressure))
    assert decision.first_page == 10
    assert decision.reason == "nothing gained"


def test_pressure_makes_all_pruning_holders_fork_when_their_parts_pay() -> None:
    sparse = case([4] * 16, [2] * 16, pressure=True)  # each part 8 pages, each copy 4
    assert decide_fork(sparse).first_page < 16
    dense = case([9] * 16, [2] * 16, pressure=True)  # each part 8 pages, each copy 9
    assert decide_fork(dense).first_page == 16
    assert decide_fork(case([4] * 16, [2] * 16)).first_page == 16


def test_empty_exclusive_pages_are_let_go_without_a_copy() -> None:
    decision = decide_fork(case([0, 0, 0], [1, 1, 1], remaining=0))
    assert (decision.first_page, decision.cost_pages, decision.moved_tokens) == (0, 0, 0)


def test_live_prefix_without_gain_is_left() -> None:
    assert decide_fork(case([16] * 5, [1] * 5)).first_page == 5


def test_no_headroom_and_reserve() -> None:
    tight = {"free_pages": 3, "reserve_pages": 2, "starts": np.array([0])}
    found = decide_fork(case([8] * 4, [1] * 4, **tight))
    assert (found.first_page, found.reason, found.wanted_pages) == (4, "no headroom", 2)


def test_a_part_that_fits_is_forked_where_the_best_one_does_not() -> None:
    """The last two pages are worth it whatever those before them would be with more room."""
    own_end = {"starts": np.array([0, 8]), "free_pages": 6, "reserve_pages": 4, "pressure": True}
    found = decide_fork(case([6] * 10, [2] * 8 + [1] * 2, **own_end))
    assert (found.first_page, found.cost_pages, found.released_pages) == (8, 1, 2.0)


def test_what_takes_nothing_fits_into_a_pool_without_room() -> None:
    short = {"free_pages": 1, "reserve_pages": 5}
    assert decide_fork(case([0] * 3, [1] * 3, **short)).first_page == 0
    assert decide_fork(case([1] * 3, [1] * 3, **short)).first_page == 3


@pytest.mark.parametrize(("free", "reason"), [(7, "no room for all"), (8, "pays")])
def test_a_joint_fork_starts_only_with_room_for_everybody(free: int, reason: str) -> None:
    """Two copies of 4 pages; after the first alone, the prefix would still be held."""
    node = {"starts": np.array([0]), "free_pages": free, "pressure": True}
    found = decide_fork(case([4] * 16, [2] * 16, **node))
    assert (found.reason, found.wanted_pages) == (reason, 0)


def test_request_about_to_finish_is_left() -> None:
    assert decide_fork(case([8] * 4, [1] * 4, remaining=0)).reason == "too short a life"
    assert decide_fork(case([8] * 4, [1] * 4, remaining=1)).reason == "pays"


def test_empty_prefix() -> None:
    assert decide_fork(case([], [])).first_page == 0


@st.composite
def cases(draw: st.DrawFn) -> ForkCase:
    pages = draw(st.integers(0, 12))
    live = draw(st.lists(st.integers(0, PAGE), min_size=pages, max_size=pages))
    # Holders never grow along a path.
    holders = sorted(
        draw(st.lists(st.integers(1, 4), min_size=pages, max_size=pages)), reverse=True
    )
    pruning = [draw(st.integers(1, h)) for h in holders]
    return case(
        live,
        holders,
        pruning,
        pressure=draw(st.booleans()),
        free_pages=draw(st.integers(0, 12)),
        reserve_pages=draw(st.integers(0, 3)),
        remaining=draw(st.integers(0, 20)),
    )


@given(cases())
def test_matches_the_formula(given_case: ForkCase) -> None:
    pages = len(given_case.live)
    share = [
        Fraction(1)
        if h == 1
        else Fraction(1, int(h))
        if given_case.pressure and p == h
        else Fraction(0)
        for h, p in zip(given_case.holders, given_case.pruning_holders, strict=True)
    ]
    moved = [int(given_case.live[b:].sum()) for b in range(pages + 1)]
    gain = [sum(share[b:], Fraction(0)) - ceil(Fraction(moved[b], PAGE)) for b in range(pages + 1)]
    copies = [
        int(live) * (int(h) - 1) if 0 < part < 1 else 0
        for live, h, part in zip(given_case.live, given_case.holders, share, strict=True)
    ]
    room = [
        ceil(Fraction(moved[b], PAGE)) + ceil(Fraction(sum(copies[b:]), PAGE))
        for b in range(pages + 1)
    ]
    free = max(0, given_case.free_pages - given_case.reserve_pages)
    best = max((b for b in range(pages + 1) if room[b] <= free), key=lambda b: (gain[b], b))
    pays = gain[best] >= 1 and gain[best] * PAGE * given_case.remaining >= moved[best]
    decision = decide_fork(given_case)
    if not pays:
        assert decision.first_page == pages
        assert decision.gain_pages == 0
        return
    # Sums of 1/h in floating point may break an exact tie: any b of the best gain is right.
    assert gain[decision.first_page] == pytest.approx(float(gain[best]))
    assert decision.moved_tokens == moved[decision.first_page]


@given(cases())
def test_curves_never_grow_with_the_starting_page(given_case: ForkCase) -> None:
    for curve in fork_curves(given_case):
        assert (np.diff(curve) <= 0).all()
        assert curve[-1] == 0
