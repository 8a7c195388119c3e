"""The cost rule of copy-on-write: from which page on, if any, should a request fork its prefix?

A fork at page b copies the row's live tokens of pages [b, p) of its tree-owned prefix into private
pages and moves the row's tree lock up to b. With P the page size, live(i) the row's live tokens in
page i, h(i) the running requests that hold page i (this one included), all(i) true when every one
of them may fork (it prunes, and its strategy is not skip or mask):

    cost(b)  = ceil( sum_{i >= b} live(i) / P )                        pages taken, at once
    share(i) = 1         if h(i) = 1                                   pages that become evictable
             = 1 / h(i)  if pressure and all(i)
             = 0         otherwise
    gain(b)  = sum_{i >= b} share(i) - cost(b)
    room(b)  = cost(b) + ceil( sum_{i >= b, 0 < share(i) < 1} live(i) (h(i) - 1) / P )
    b*       = the largest b that maximises gain(b), of those where a fork may start and
               room(b) <= max(0, free pages - reserve)

    fork at b*  iff  gain(b*) >= 1
                and  gain(b*) * P * remaining >= sum_{i >= b*} live(i)

Otherwise the evicted tokens stay masked, which is free. The 1 / h(i) term is each holder's part of
a page that is released only when the last of them has forked: if all of them may fork and each
finds that its part pays, all fork, and the sum of their gains is what the pool gets. So there must
be room for the copies of all, taken to be as large as this one's: the first to fork would otherwise
use up what the last one needs, and nothing would be released. Without pressure a hot prefix stays
shared. The last condition weighs token-steps of memory saved against tokens copied, so that a
request about to finish is left alone. (The paper skips shared pages: b* = p always.)

The engine lets a fork start where a node of its tree ends. Starting inside a node would split it,
and SGLang dates the split-off part now, so that a prefix nobody uses would outlive a hot one. That
costs no memory: h is the same all over a node, and a page adds at most itself to the cost.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkCase:
    """What the rule weighs. Arrays are int64 [p], one entry per tree-owned page in row order.

    Fields:
        live: the row's live tokens in the page, 0 .. page_size.
        holders: running requests whose lock covers the page, this one included; >= 1.
        pruning_holders: how many of them prune and may fork; <= holders.
        page_size: tokens.
        free_pages: pages the pool could hand out now.
        reserve_pages: of those, pages that a fork must leave alone.
        pressure: the pool is short of pages.
        remaining: tokens the request may still generate; its expected remaining life in steps.
        starts: int64, ascending pages at which a fork may start; None: at any.
    """

    live: NDArray[np.int64]
    holders: NDArray[np.int64]
    pruning_holders: NDArray[np.int64]
    page_size: int
    free_pages: int
    reserve_pages: int
    pressure: bool
    remaining: int
    starts: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkDecision:
    """What the rule says.

    Fields:
        first_page: the fork starts here; equal to the number of tree-owned pages: no fork.
        cost_pages: private pages the fork takes.
        released_pages: pages that become evictable (under pressure in part others' doing).
        moved_tokens: live tokens to copy.
        reason: which condition decided, for the log.
        wanted_pages: with "no headroom", pages that a fork which pays for itself would take.
    """

    first_page: int
    cost_pages: int
    released_pages: float
    moved_tokens: int
    reason: str
    wanted_pages: int = 0

    @property
    def gain_pages(self) -> float:
        """Predicted pages saved."""
        return self.released_pages - self.cost_pages


def decide_fork(case: ForkCase) -> ForkDecision:
    """Apply the rule of this module. Pure; O(p)."""
    pages = len(case.live)
    moved, cost, released = fork_curves(case)
    gain = released - cost
    starts = np.arange(pages + 1) if case.starts is None else np.append(case.starts, pages)
    room = max(0, case.free_pages - case.reserve_pages)  # what takes nothing always fits
    fits = cost + _copies_of_others(case) <= room
    best = _largest_best(starts[fits[starts]], gain)
    refusal, wanted = "", 0
    if gain[best] < 1:
        alone = _suffix_sums(np.where(case.holders == 1, 1.0, 0.0)) - cost
        wished = _largest_best(starts, alone)
        refusal = "nothing gained" if gain[starts].max() < 1 else "no room for all"
        if alone[wished] >= 1:
            refusal, wanted = "no headroom", int(cost[wished])
    elif gain[best] * case.page_size * case.remaining < moved[best]:
        refusal = "too short a life"
    if refusal:
        return ForkDecision(
            first_page=pages,
            cost_pages=0,
            released_pages=0.0,
            moved_tokens=0,
            reason=refusal,
            wanted_pages=wanted,
        )
    return ForkDecision(
        first_page=best,
        cost_pages=int(cost[best]),
        released_pages=float(released[best]),
        moved_tokens=int(moved[best]),
        reason="pays",
    )


def _largest_best(starts: NDArray[np.int64], gain: NDArray[np.float64]) -> int:
    """Of equal gains the largest start: same memory, fewer tokens copied."""
    return int(starts[::-1][np.argmax(gain[starts][::-1])])


def fork_curves(
    case: ForkCase,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Moved tokens, cost and released pages for every b in 0 .. p (inclusive), each [p + 1]."""
    share = np.where(case.holders == 1, 1.0, 0.0)
    share = np.where(_joint(case), 1.0 / case.holders, share)
    moved = _suffix_sums(case.live.astype(np.float64)).astype(np.int64)
    cost = -(-moved // case.page_size)
    # Three thirds make one page: unrounded, a gain of one could come out below one.
    return moved, cost, _suffix_sums(share).round(9)


def _joint(case: ForkCase) -> NDArray[np.bool_]:
    """Pages that are released if every holder forks, as the pool is short; bool [p]."""
    joint: NDArray[np.bool_] = (case.holders > 1) & (case.pruning_holders == case.holders)
    return joint & np.bool_(case.pressure)


def _copies_of_others(case: ForkCase) -> NDArray[np.int64]:
    """Pages the other holders' copies take for those pages, for every b; [p + 1]."""
    others = np.where(_joint(case), case.live * (case.holders - 1), 0)
    return -(-_suffix_sums(others.astype(np.float64)).astype(np.int64) // case.page_size)


def _suffix_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)
