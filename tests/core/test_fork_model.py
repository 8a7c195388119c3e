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


def gain_of(case: ForkCase, first: int) -> tuple[float, int, int, int]:
    """(pages gained, pages taken, tokens moved, pages taken by all who must fork) of a fork at page
    `first`, counted one by one."""
    gained, moved, others = 0.0, 0, 0
    for page in range(first, len(case.live)):
        holders = int(case.holders[page])
        moved += int(case.live[page])
        if holders == 1:
            gained += 1
        elif case.pressure and case.pruning_holders[page] == holders:
            gained += 1 / holders
            others += (holders - 1) * int(case.live[page])
    taken = -(-moved // case.page_size)
    return gained - taken, taken, moved, taken - (-others // case.page_size)


@given(case=cases())
def test_the_rule_finds_the_best_fork_or_says_why_not(case: ForkCase) -> None:
    pages = len(case.live)
    decision = decide_fork(case)
    every = [gain_of(case, first) for first in range(pages + 1)]
    room = max(0, case.free_pages - case.reserve_pages)
    fitting = [first for first, (_, _, _, needed) in enumerate(every) if needed <= room]
    best = max(every[first][0] for first in fitting)
    if decision.first_page < pages:
        gain, taken, moved, needed = every[decision.first_page]
        assert abs(decision.gain_pages - gain) < 1e-9
        assert (decision.cost_pages, decision.moved_tokens) == (taken, moved)
        assert gain >= best - 1e-9
        assert gain >= 1 - 1e-9  # thirds and sixths do not add up exactly
        assert needed <= room
        assert gain * case.page_size * case.remaining >= moved - 1e-6
        return
    at = max(first for first in fitting if every[first][0] >= best - 1e-9)
    gain, _, moved, _ = every[at]
    wished = max(gain for gain, _, _, _ in every)
    refused = {
        "nothing gained": wished < 1 + 1e-9,
        "no headroom": gain < 1 + 1e-9 and wished >= 1 - 1e-9 and decision.wanted_pages > room,
        "no room for all": gain < 1 + 1e-9 and wished >= 1 - 1e-9 and case.pressure,
        "too short a life": gain * case.page_size * case.remaining < moved + 1e-6,
    }
    assert refused[decision.reason]
    assert bool(decision.wanted_pages) == (decision.reason == "no headroom")


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
