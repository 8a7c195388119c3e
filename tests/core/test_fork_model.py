"""The cost rule against a search of every fork, and what any fork it allows must be worth."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vtoken_sglang.core.fork import ForkCase, decide_fork


@st.composite
def cases(draw: st.DrawFn) -> ForkCase:
    page_size = draw(st.sampled_from([1, 4, 16]))
    pages = draw(st.integers(1, 24))
    live = draw(st.lists(st.integers(0, page_size), min_size=pages, max_size=pages))
    # Holders never grow along a path: who holds a page holds every page before it.
    holders = sorted(draw(st.lists(st.integers(1, 6), min_size=pages, max_size=pages)))[::-1]
    pruning = [draw(st.integers(0, holder)) for holder in holders]
    return ForkCase(
        live=np.array(live, np.int64),
        holders=np.array(holders, np.int64),
        pruning_holders=np.array(pruning, np.int64),
        page_size=page_size,
        free_pages=draw(st.integers(0, 40)),
        reserve_pages=draw(st.integers(0, 8)),
        pressure=draw(st.booleans()),
        remaining=draw(st.integers(0, 400)),
    )


def gain_of(case: ForkCase, first: int) -> tuple[float, int, int]:
    """(pages gained, pages taken, tokens moved) of a fork at page `first`, counted one by one."""
    gained, moved = 0.0, 0
    for page in range(first, len(case.live)):
        holders = int(case.holders[page])
        moved += int(case.live[page])
        if holders == 1:
            gained += 1
        elif case.pressure and case.pruning_holders[page] == holders:
            gained += 1 / holders
    taken = -(-moved // case.page_size)
    return gained - taken, taken, moved


@given(case=cases())
def test_the_rule_finds_the_best_fork_or_says_why_not(case: ForkCase) -> None:
    pages = len(case.live)
    decision = decide_fork(case)
    every = [gain_of(case, first) for first in range(pages + 1)]
    best = max(gain for gain, _, _ in every)
    if decision.first_page < pages:
        gain, taken, moved = every[decision.first_page]
        assert abs(decision.gain_pages - gain) < 1e-9
        assert (decision.cost_pages, decision.moved_tokens) == (taken, moved)
        assert gain >= best - 1e-9
        assert gain >= 1 - 1e-9  # thirds and sixths do not add up exactly
        assert taken <= case.free_pages - case.reserve_pages
        assert gain * case.page_size * case.remaining >= moved - 1e-6
        return
    at = max(first for first, (gain, _, _) in enumerate(every) if gain >= best - 1e-9)
    gain, taken, moved = every[at]
    refused = {
        "nothing gained": gain < 1 + 1e-9,
        "no headroom": taken > case.free_pages - case.reserve_pages,
        "too short a life": gain * case.page_size * case.remaining < moved + 1e-6,
    }
    assert refused[decision.reason]


@given(case=cases())
def test_a_page_that_others_keep_is_never_worth_a_copy(case: ForkCase) -> None:
    """Where no one is the last holder and the pool is not short, the prefix stays shared."""
    shared = ForkCase(
        live=case.live,
        holders=case.holders + 1,
        pruning_holders=case.pruning_holders,
        page_size=case.page_size,
        free_pages=case.free_pages,
        reserve_pages=case.reserve_pages,
        pressure=False,
        remaining=case.remaining,
    )
    assert decide_fork(shared).first_page == len(case.live)


@given(case=cases())
def test_what_all_holders_gain_is_what_the_pool_gains(case: ForkCase) -> None:
    """Under pressure each of h pruning holders counts 1/h of a page; if all fork, all of it."""
    joint = ForkCase(
        live=case.live,
        holders=case.holders,
        pruning_holders=case.holders,
        page_size=case.page_size,
        free_pages=case.free_pages,
        reserve_pages=case.reserve_pages,
        pressure=True,
        remaining=case.remaining,
    )
    decision = decide_fork(joint)
    released = (1 / joint.holders[decision.first_page :]).sum()
    assert abs(released - decision.released_pages) < 1e-9
