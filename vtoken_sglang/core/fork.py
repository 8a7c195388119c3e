"""The cost rule of copy-on-write: from which page on, if any, should a request fork its prefix?

A fork at page b copies the row's live tokens of pages [b, p) of its tree-owned prefix into private
pages and moves the row's tree lock up to b. With P the page size, live(i) the row's live tokens in
page i, h(i) the running requests that hold page i (this one included), all(i) true when every one
of them prunes:

    cost(b)  = ceil( sum_{i >= b} live(i) / P )                        pages taken, at once
    share(i) = 1         if h(i) = 1                                   pages that become evictable
             = 1 / h(i)  if pressure and all(i)
             = 0         otherwise
    gain(b)  = sum_{i >= b} share(i) - cost(b)
    b*       = the largest b, of those where a fork may start, that maximises gain(b)

    fork at b*  iff  gain(b*) >= 1
                and  cost(b*) <= free pages - reserve
                and  gain(b*) * P * remaining >= sum_{i >= b*} live(i)

Otherwise the dead tokens stay masked, which is free. The 1 / h(i) term is each holder's part of a
page that is released only when the last of them has forked: if all prune and each finds that its
part pays, all fork, and the sum of their gains is what the pool gets. Without pressure a hot prefix
stays shared. The last condition weighs token-steps of memory saved against tokens copied, so that a
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
    """What the rule looks at. Arrays are int64 [p], one entry per tree-owned page in row order.

    Fields:
        live: the row's live tokens in the page, 0 .. page_size.
        holders: running requests whose lock covers the page, this one included; >= 1.
        pruning_holders: how many of them prune; <= holders.
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
    """

    first_page: int
    cost_pages: int
    released_pages: float
    moved_tokens: int
    reason: str

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
    # Of equal gains the largest b: same memory, fewer tokens copied.
    best = int(starts[::-1][np.argmax(gain[starts][::-1])])
    decision = ForkDecision(
        first_page=best,
        cost_pages=int(cost[best]),
        released_pages=float(released[best]),
        moved_tokens=int(moved[best]),
        reason="pays",
    )
    refusal = _refusal(case, decision)
    if not refusal:
        return decision
    return ForkDecision(
        first_page=pages, cost_pages=0, released_pages=0.0, moved_tokens=0, reason=refusal
    )


def fork_curves(
    case: ForkCase,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Moved tokens, cost and released pages for every b in 0 .. p (inclusive), each [p + 1]."""
    share = np.where(case.holders == 1, 1.0, 0.0)
    if case.pressure:
        joint = (case.holders > 1) & (case.pruning_holders == case.holders)
        share = np.where(joint, 1.0 / case.holders, share)
    moved = _suffix_sums(case.live.astype(np.float64)).astype(np.int64)
    cost = -(-moved // case.page_size)
    return moved, cost, _suffix_sums(share)


def _suffix_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


def _refusal(case: ForkCase, decision: ForkDecision) -> str:
    if decision.gain_pages < 1:
        return "nothing gained"
    if decision.cost_pages > case.free_pages - case.reserve_pages:
        return "no headroom"
    if decision.gain_pages * case.page_size * case.remaining < decision.moved_tokens:
        return "too short a life"
    return ""
