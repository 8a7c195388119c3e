"""Expected footprint: what is reclaimed is bounded, everything else is charged in full."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtoken_sglang.core.footprint import (
    CHUNKS_IN_FLIGHT,
    Prefill,
    PruneRule,
    expected_footprint,
    expected_growth,
    fork_cost,
    largest,
    page_ceil,
    private_need,
    published_need,
    settled_tokens,
)
from vtoken_sglang.core.types import page_floor

WINDOW = PruneRule(target=lambda _: 320, protected=36, interval=16, page_size=16, waste=0.0)
SHARE = PruneRule(
    target=lambda length: math.ceil(0.3 * length),
    protected=36,
    interval=16,
    page_size=16,
    waste=0.25,
)
PROMPT = Prefill(length=1000, cached=0, new=100, published=False, forks=False, chunk=None)


def test_the_bound_is_target_waste_interval_and_open_page() -> None:
    assert WINDOW.bound(10_000) == 320 + 16 + 16
    assert SHARE.bound(1000) == page_ceil(math.ceil(300 / 0.75) + 16, 16) + 16
    # Neither waste nor rounding where a page is a token.
    assert replace(SHARE, page_size=1).bound(1000) == 300 + 16 + 1


def test_protected_tokens_are_held_whatever_the_target() -> None:
    rule = replace(WINDOW, target=lambda _: 1)
    assert rule.bound(5000) == page_ceil(36 + 16, 16) + 16


def test_a_short_request_is_charged_its_length() -> None:
    assert settled_tokens(WINDOW, 100, 0) == 112
    assert settled_tokens(WINDOW, 100, 96) == 16
    assert settled_tokens(WINDOW, 96, 96) == 0


def test_a_private_prompt_is_charged_in_full_until_it_is_pruned() -> None:
    found = expected_footprint(WINDOW, PROMPT)
    assert found.prefill == 1008 + 16
    assert found.settled == 352
    assert found.full == page_ceil(1100, 16) + 16
    assert found.peak == found.prefill


def test_chunks_of_a_private_prompt_are_pruned_on_the_way() -> None:
    found = expected_footprint(WINDOW, replace(PROMPT, chunk=128))
    assert (
        found.prefill == 352 + CHUNKS_IN_FLIGHT * 128 + 16
    )  # chunks in full, until copies take effect
    assert found.settled == 352
    # One chunk is not pruned on the way, nor is a prompt that goes into the tree.
    assert expected_footprint(WINDOW, replace(PROMPT, chunk=1000)).prefill == 1024
    published = replace(PROMPT, chunk=128, published=True)
    assert expected_footprint(WINDOW, published).prefill == 1024


def test_what_the_tree_keeps_is_charged_in_full() -> None:
    """Strategies skip and mask: only generated tokens are ever given back."""
    found = expected_footprint(WINDOW, replace(PROMPT, published=True, new=1000))
    assert found.settled == 992 + 352
    few = expected_footprint(WINDOW, replace(PROMPT, published=True, new=10))
    assert few.settled == 992 + (page_ceil(1010, 16) - 992)


def test_a_fork_gives_the_prompt_back() -> None:
    found = expected_footprint(WINDOW, replace(PROMPT, published=True, forks=True))
    assert found.settled == 352


def test_a_cached_prefix_is_not_charged_again() -> None:
    found = expected_footprint(WINDOW, replace(PROMPT, cached=960, published=True))
    assert found.prefill == page_ceil(40, 16) + 16
    # A fork never costs more than keeping everything would.
    forked = expected_footprint(WINDOW, replace(PROMPT, cached=960, published=True, forks=True))
    assert forked.settled == forked.full


def test_growth_counts_what_is_held_already() -> None:
    grown = {"length": 1000, "remaining": 500, "pinned": 0}
    assert expected_growth(WINDOW, **grown, private=320) == 32
    assert expected_growth(WINDOW, **grown, private=1008) == 0  # about to be pruned: never negative
    masked = expected_growth(WINDOW, length=1000, remaining=500, pinned=992, private=16)
    assert masked == 352 - 16


def test_what_a_request_needs_of_an_empty_pool() -> None:
    assert private_need(WINDOW, 100_000) == 352 + 4 * 16
    case = replace(PROMPT, published=True, new=1000)
    assert published_need(WINDOW, case) == 992 + 352
    assert published_need(WINDOW, replace(case, cached=960)) == 992 + 352
    forks = replace(case, forks=True)  # the copies and the prefix exist together for a moment
    assert published_need(WINDOW, forks) == 992 + fork_cost(WINDOW, 1000)


@given(limit=st.integers(0, 5000), last=st.integers(-1, 5000))
def test_largest_is_the_last_that_holds(limit: int, last: int) -> None:
    found = largest(lambda number: number <= last, limit)
    assert found == (None if last < 0 else min(last, limit))


rules = st.builds(
    lambda share, protected, interval, page_size, waste: PruneRule(
        target=lambda length: math.ceil(share * length),
        protected=protected,
        interval=interval,
        page_size=page_size,
        waste=waste,
    ),
    share=st.floats(0.05, 1.0),
    protected=st.integers(0, 64),
    interval=st.integers(1, 64),
    page_size=st.sampled_from([1, 16, 64]),
    waste=st.floats(0.0, 0.5),
)


@given(
    rule=rules,
    length=st.integers(1, 4000),
    new=st.integers(0, 2000),
    cached_share=st.floats(0.0, 1.0),
    published=st.booleans(),
    forks=st.booleans(),
    chunk=st.one_of(st.none(), st.sampled_from([64, 256])),
)
def test_never_more_than_without_reclaim_and_monotone(
    rule: PruneRule,
    length: int,
    new: int,
    cached_share: float,
    published: bool,
    forks: bool,
    chunk: int | None,
) -> None:
    cached = page_floor(int(cached_share * (length - 1)), rule.page_size)
    case = Prefill(
        length=length, cached=cached, new=new, published=published, forks=forks, chunk=chunk
    )
    found = expected_footprint(rule, case)
    assert 0 <= found.settled <= found.full
    assert 0 < found.prefill <= page_ceil(length - cached, rule.page_size) + rule.page_size
    more = expected_footprint(rule, replace(case, new=new + 50))
    assert more.settled >= found.settled
    assert rule.bound(length + 1) >= rule.bound(length)
    assert private_need(rule, length + 1) >= private_need(rule, length)
    # An empty pool that takes the request published also takes its whole prompt at once.
    if published:
        assert expected_footprint(rule, replace(case, cached=0)).peak <= published_need(rule, case)


@pytest.mark.parametrize("waste", [1.0, -0.1])
def test_a_waste_that_makes_no_sense_is_refused(waste: float) -> None:
    with pytest.raises(AssertionError):
        replace(WINDOW, waste=waste)
