"""Which sealed pages of a row to empty: a pure function of a few numbers and their live counts.

Fully empty pages never come here; they are freed without a copy. Of the rest, the emptiest first:
emptying the n emptiest pages costs ceil(tokens / page_size) new pages and as many token copies as
they hold, so

    gain(n) = n - ceil(cum_live(n) / page_size)

Greedy by live count gives the greatest gain for every n, and gain never falls as n grows, so the
smallest n with the greatest gain copies the fewest tokens for it. (Paper section 4.3: the trigger
is F > 0.25.) Below that trigger a row is only merged: as many pages as fit into a single one.
"""

from dataclasses import dataclass

import numpy as np

from vtoken_sglang.core.settings import ReclaimSettings
from vtoken_sglang.core.types import Int64Array, IntArray, page_count


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWaste:
    """What the planner must know about a row before it looks at single pages.

    Fields:
        page_size: tokens per page.
        sealed_pages, sealed_live: sealed private pages held, fully dead ones excluded, and the
            live tokens in them.
        repacked_waste: waste right after the row's last repack; NEVER_REPACKED if there was
            none, or if it was cut short by a limit and should go on.
    """

    page_size: int
    sealed_pages: int
    sealed_live: int
    repacked_waste: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Pages to empty.

    Fields:
        sources: int64 [s], indices into the `live` array the planner was given, emptiest first.
        dst_pages: new pages needed, less than s.
        tokens: live tokens to move.
        limited: whether a limit (free pages, tokens) kept pages out of the choice.
    """

    sources: Int64Array
    dst_pages: int
    tokens: int
    limited: bool


def reachable_gain(row: RowWaste) -> int:
    """Pages a repack of every partly filled page would return. Exact: full pages change nothing."""
    return row.sealed_pages - page_count(row.sealed_live, row.page_size)


def wants_repack(row: RowWaste, settings: ReclaimSettings, pressure: bool) -> bool:
    """Whether the row is worth a look: something to gain, waste above the trigger (or the pool
    under pressure), and grown since the last repack by the hysteresis."""
    if row.page_size == 1 or reachable_gain(row) < settings.min_gain_pages:
        return False
    waste = 1.0 - row.sealed_live / (row.sealed_pages * row.page_size)
    if not pressure and waste <= settings.threshold:
        return False
    return waste >= row.repacked_waste + settings.hysteresis


def wants_merge(row: RowWaste, settings: ReclaimSettings) -> bool:
    """Whether pages of a row below the trigger could be merged, told from its sums alone."""
    return settings.merge and row.page_size > 1 and reachable_gain(row) >= settings.min_gain_pages


def choose_sources(
    live: IntArray, *, page_size: int, free_pages: int, max_tokens: int, min_gain: int
) -> Choice | None:
    """The fewest, emptiest pages whose emptying returns the most pages.

    `live`: live tokens of each partly filled sealed page, each within (0, page_size).
    `free_pages`: pages the pool can lend for destinations; never exceeded (evacuation headroom).
    `max_tokens`: most tokens to copy. Returns None when nothing within these limits returns at
    least `min_gain` (>= 1) pages more than it takes.
    """
    if len(live) < 2 or free_pages < 1:
        return None
    order = np.argsort(live, kind="stable")
    tokens = np.cumsum(live[order], dtype=np.int64)
    needed = -(-tokens // page_size)
    within = int(np.searchsorted(needed, free_pages, side="right"))
    within = min(within, int(np.searchsorted(tokens, max_tokens, side="right")))
    if within < 2:
        return None
    gain = np.arange(1, within + 1) - needed[:within]
    best = int(gain.argmax())
    if gain[best] < min_gain:
        return None
    return Choice(
        sources=order[: best + 1].astype(np.int64),
        dst_pages=int(needed[best]),
        tokens=int(tokens[best]),
        limited=within < len(live),
    )
