"""How much of the pool a request is expected to hold: what admission charges for it.

A request of logical length L, pruned by a rule, holds in private pages at most

    bound(L) = page_ceil( max(target(L), protected) / (1 - waste) + interval ) + page

tokens between two evictions, and never more than L: the live tokens its policy aims at, spread over
pages of which `waste` is evicted, what it grows by until the next eviction, and the open page.
Everything that is not reclaimed is charged in full: pages that the radix tree owns and this request
keeps locked, chunks of a prompt that may not be pruned yet, and a request that is not pruned.

Pure functions of plain numbers. Lengths are tokens; what is held or taken counts whole pages, in
tokens. (The paper frees pages and leaves admission as it is; its concurrency comes from there.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from vtoken_sglang.core.types import LAG, page_floor

CHUNKS_IN_FLIGHT: Final = 1 + LAG
"""Chunks of a private prompt beyond what it is pruned to: the one computed, and those allocated
until the copies of what was kept take effect."""
PROGRESS_PAGES: Final = 4
"""Free pages with which a private prompt still gets on: a chunk of one page in flight, the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneRule:
    """How one request is pruned and reclaimed.

    Fields:
        target: live tokens aimed at, by logical length; monotone.
        protected: tokens that are never evicted (sink and recent).
        interval: tokens between two evictions. page_size: tokens.
        waste: share of the retained pages expected to be evicted, in [0, 1); counts where pages
            hold more than one token.
    """

    target: Callable[[int], int]
    protected: int
    interval: int
    page_size: int
    waste: float

    def __post_init__(self) -> None:
        assert 0.0 <= self.waste < 1.0, self.waste
        assert self.page_size >= 1, self.page_size

    def bound(self, length: int) -> int:
        """Maximum tokens of private pages at logical `length`; see the module."""
        kept = max(self.target(length), self.protected)
        spread = ceil(kept / (1 - self.waste)) if self.page_size > 1 else kept
        return page_ceil(spread + self.interval, self.page_size) + self.page_size

    def with_waste(self, waste: float) -> PruneRule:
        return replace(self, waste=waste)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """A request before its prefill.

    Fields:
        length: tokens its prefill ends at. cached: of those, held by the radix tree already (page
            multiple). new: tokens it is expected to generate.
        published: its full pages become the tree's after the prefill.
        forks: it leaves the tree by copy-on-write when it is pruned.
        chunk: tokens computed per step; None without chunking.
    """

    length: int
    cached: int
    new: int
    published: bool
    forks: bool
    chunk: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a request takes from the pool beyond what is cached already.

    Fields:
        prefill: maximum held until it is first pruned. settled: maximum held afterwards.
        full: what both would be if nothing was reclaimed.
    """

    prefill: int
    settled: int
    full: int

    @property
    def peak(self) -> int:
        return max(self.prefill, self.settled)


def page_ceil(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size) * page_size


def settled_tokens(rule: PruneRule, length: int, pinned: int) -> int:
    """Maximum tokens of private pages at logical `length`, of which the tree keeps the first
    `pinned` (page multiple) for good."""
    return max(0, min(page_ceil(length, rule.page_size) - pinned, rule.bound(length)))


def expected_footprint(rule: PruneRule, case: Prefill) -> Footprint:
    """What to charge for a request that waits."""
    size = rule.page_size
    extend = case.length - case.cached
    final = case.length + case.new
    whole = page_ceil(extend, size) + size
    full = page_ceil(extend + case.new, size) + size
    prefill = whole
    if case.published:
        pinned = 0 if case.forks else page_floor(case.length, size)
        tree = max(0, pinned - case.cached)
        settled = tree + settled_tokens(rule, final, pinned)
    else:
        settled = settled_tokens(rule, final, case.cached)
        if case.chunk is not None and extend > case.chunk:
            prefill = min(whole, rule.bound(case.length) + CHUNKS_IN_FLIGHT * case.chunk + size)
    return Footprint(prefill=prefill, settled=min(settled, full), full=full)


def expected_growth(
    rule: PruneRule, *, length: int, remaining: int, pinned: int, private: int
) -> int:
    """Maximum of further tokens a running request will take.

    Args:
        length: tokens it has. remaining: tokens it is expected to generate.
        pinned: positions the tree owns and keeps. private: tokens of the private pages it holds.
    """
    return max(0, settled_tokens(rule, length + remaining, pinned) - private)


def fork_cost(rule: PruneRule, length: int) -> int:
    """Free tokens a request of `length` needs for a moment to leave the tree by copy-on-write."""
    return min(page_ceil(length, rule.page_size), rule.bound(length))


def private_need(rule: PruneRule, length: int) -> int:
    """Tokens that an otherwise empty pool must have for a request to reach logical `length` with
    its prompt unpublished, in chunks as small as need be."""
    return rule.bound(length) + PROGRESS_PAGES * rule.page_size


def published_need(rule: PruneRule, case: Prefill) -> int:
    """Tokens that it must have with the prompt in the tree meanwhile."""
    assert case.published
    need = expected_footprint(rule, replace(case, cached=0)).peak
    if not case.forks:
        return need
    return max(need, page_floor(case.length, rule.page_size) + fork_cost(rule, case.length))


def largest(holds: Callable[[int], bool], limit: int) -> int | None:
    """The largest of 0 to `limit` for which `holds`, given that it holds for all below one for
    which it does; None when it does not hold for 0."""
    if not holds(0):
        return None
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
