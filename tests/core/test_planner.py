import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken_sglang.core.planner import (
    RowWaste,
    choose_sources,
    reachable_gain,
    wants_merge,
    wants_repack,
)
from vtoken_sglang.core.types import NEVER_REPACKED, ReclaimSettings
from vtoken_sglang.errors import ConfigError


def waste_of(live: list[int], page_size: int = 16, repacked: float = NEVER_REPACKED) -> RowWaste:
    return RowWaste(
        page_size=page_size,
        sealed_pages=len(live),
        sealed_live=sum(live),
        repacked_waste=repacked,
    )


def choose(live: list[int], *, size: int = 16, free: int = 99, tokens: int = 10**6, gain: int = 1):  # type: ignore[no-untyped-def]
    return choose_sources(
        np.array(live, np.int64), page_size=size, free_pages=free, max_tokens=tokens, min_gain=gain
    )


def test_emptiest_first_and_no_more_than_needed() -> None:
    choice = choose([12, 2, 15, 3, 4, 14])
    assert choice is not None
    assert choice.sources.tolist() == [1, 3, 4]
    assert (choice.dst_pages, choice.tokens, choice.limited) == (1, 9, False)


def test_nothing_to_gain_means_no_plan() -> None:
    assert choose([15, 15]) is None
    assert choose([5]) is None
    assert choose([]) is None


def test_headroom_is_never_exceeded() -> None:
    live = [8] * 40
    assert choose(live, free=0) is None
    choice = choose(live, free=1)
    assert choice is not None
    assert (choice.dst_pages, len(choice.sources), choice.limited) == (1, 2, True)
    choice = choose(live, free=3)
    assert choice is not None
    assert (choice.dst_pages, len(choice.sources)) == (3, 6)


def test_token_limit_and_least_gain() -> None:
    assert choose([8] * 40, tokens=15) is None
    choice = choose([8] * 40, tokens=40)
    assert choice is not None
    assert choice.tokens <= 40
    assert choice.limited
    assert choose([8, 8, 8, 8], gain=3) is None


@settings(max_examples=300, deadline=None)
@given(
    size=st.sampled_from([2, 4, 16]),
    fills=st.lists(st.floats(0.0, 0.999), max_size=9),
    free=st.integers(0, 6),
    tokens=st.integers(1, 100),
)
def test_against_exhaustive_search(size: int, fills: list[float], free: int, tokens: int) -> None:
    """No subset within the limits gains more, and none with that gain copies fewer tokens."""
    live = [1 + int(f * (size - 1)) for f in fills]
    best = (0, 0)
    for count in range(2, len(live) + 1):
        for subset in itertools.combinations(live, count):
            total = sum(subset)
            needed = -(-total // size)
            if needed <= free and total <= tokens and count - needed >= 1:
                best = max(best, (count - needed, -total))
    choice = choose(live, size=size, free=free, tokens=tokens)
    if best == (0, 0):
        assert choice is None
        return
    assert choice is not None
    total = sum(live[i] for i in choice.sources)
    assert (len(choice.sources) - choice.dst_pages, -total) == best
    assert choice.tokens == total
    assert choice.dst_pages == -(-total // size) <= free


def test_trigger_pressure_and_hysteresis() -> None:
    options = ReclaimSettings(threshold=0.25, hysteresis=0.1)
    low = waste_of([13] * 20)
    assert not wants_repack(low, options, pressure=False)
    assert wants_repack(low, options, pressure=True)
    high = waste_of([11] * 20)
    assert wants_repack(high, options, pressure=False)
    recent = waste_of([11] * 20, repacked=1 - 11 / 16 - 0.05)
    assert not wants_repack(recent, options, pressure=True)
    grown = waste_of([11] * 20, repacked=1 - 11 / 16 - 0.11)
    assert wants_repack(grown, options, pressure=False)


def test_nothing_is_planned_without_a_page_to_gain() -> None:
    options = ReclaimSettings(threshold=0.0)
    assert reachable_gain(waste_of([9, 8])) == 0
    assert not wants_repack(waste_of([9, 8]), options, pressure=True)
    assert wants_repack(waste_of([8, 8]), options, pressure=True)
    assert not wants_repack(waste_of([], 16), options, pressure=True)
    assert not wants_repack(waste_of([1, 1, 1], 1), options, pressure=True)


@given(st.lists(st.integers(1, 15), min_size=2, max_size=40))
def test_reachable_gain_is_what_an_unlimited_choice_gains(live: list[int]) -> None:
    full = [16, 16, 16]
    choice = choose(live)
    gained = len(choice.sources) - choice.dst_pages if choice else 0
    assert gained == reachable_gain(waste_of(live + full))


@pytest.mark.parametrize(
    ("field", "value"),
    [("threshold", 1.5), ("hysteresis", -0.1), ("min_gain_pages", 0), ("max_moved_tokens", 0)],
)
def test_settings_refuse_nonsense(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        ReclaimSettings(**{field: value})


def test_a_merge_is_wanted_below_the_trigger_only_where_a_page_can_come_back() -> None:
    row = waste_of([16] * 18 + [4, 9])
    assert not wants_repack(row, ReclaimSettings(), pressure=False)
    assert wants_merge(row, ReclaimSettings())
    assert not wants_merge(row, ReclaimSettings(merge=False))
    assert not wants_merge(waste_of([16] * 18 + [4, 13]), ReclaimSettings())
    assert not wants_merge(waste_of([1, 1], page_size=1), ReclaimSettings())
