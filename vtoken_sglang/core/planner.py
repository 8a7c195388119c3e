"""Which pages to empty, and the plans that do it: repacks (row by row, within headroom) and forks.

Fully empty pages never come here; they are freed without a copy. Of the rest, the emptiest first:
emptying the n emptiest pages costs ceil(tokens / page_size) new pages and as many token copies as
they hold, so

    gain(n) = n - ceil(cum_live(n) / page_size)

Greedy by live count gives the greatest gain for every n, and gain never falls as n grows, so the
smallest n with the greatest gain copies the fewest tokens for it. (Paper section 4.3: the trigger
is F > 0.25.) Below that trigger a row is only merged: as many pages as fit into a single one.

Everything is decided by a few numbers per row; single pages are looked at only in rows that are
worth it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import (
    Int64Array,
    IntArray,
    PagePool,
    ReclaimSettings,
    RepackPlan,
    page_count,
)

_MAX_MISSES: Final = 32
"""Rows planned for in vain per step, when what is left of the limits is too little for them."""
_MIN_WINDOW: Final = 1024
_WINDOW_PER_PAGE: Final = 4
"""Pages considered per page that the token limit lets a plan fill: enough to pick empty ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWaste:
    """What the planner must know about a row before it considers single pages.

    Fields:
        page_size: tokens per page.
        sealed_pages, sealed_live: sealed private pages held, empty ones excluded, and the
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
    """Whether the row is worth planning for: something to gain, waste above the trigger (or the
    pool under pressure), and grown since the last repack by the hysteresis."""
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
    `max_tokens`: tokens to copy at most. Returns None when nothing within these limits returns at
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


def row_waste(table: TokenTable) -> RowWaste:
    """The table's numbers the planner decides on. Constant time."""
    return RowWaste(
        page_size=table.page_size,
        sealed_pages=table.ledger.sealed_pages,
        sealed_live=table.ledger.sealed_live,
        repacked_waste=table.repacked_waste,
    )


def make_plans(
    tables: Sequence[TokenTable],
    pool: PagePool,
    settings: ReclaimSettings,
    pressure: bool,
    reserve_pages: int,
) -> list[RepackPlan]:
    """Plans for the rows that are worth it; their destination pages are taken from the pool.

    Rows that can return the most pages go first, and all rows together need no more than the pool
    has free above `reserve_pages`. Nothing but the pool changes.
    """
    wanting = _wanting(tables, settings, pressure)
    if not wanting:
        return []
    headroom = pool.free_pages() - reserve_pages
    tokens_left = settings.max_moved_tokens
    chosen: list[tuple[TokenTable, Int64Array, Choice]] = []
    misses = 0
    for table, max_tokens in wanting:
        if headroom < 1 or tokens_left < table.page_size or misses > _MAX_MISSES:
            break
        window = max(_MIN_WINDOW, _WINDOW_PER_PAGE * tokens_left // table.page_size)
        candidates, complete = table.ledger.candidates(window)
        choice = choose_sources(
            table.ledger.live[candidates],
            page_size=table.page_size,
            free_pages=headroom,
            max_tokens=min(tokens_left, max_tokens),
            min_gain=settings.min_gain_pages,
        )
        if choice is None:
            misses += 1
            continue
        headroom -= choice.dst_pages
        tokens_left -= choice.tokens
        if not complete:
            choice = replace(choice, limited=True)
        chosen.append((table, candidates[choice.sources].astype(np.int64), choice))
    return _with_destinations(chosen, pool) if chosen else []


def _wanting(
    tables: Sequence[TokenTable], settings: ReclaimSettings, pressure: bool
) -> list[tuple[TokenTable, int]]:
    """Rows to plan for, each with how many tokens it may copy: repacks that return the most pages
    first, merges last. A merge is tried once per change of the row's counts."""
    repacks: list[tuple[int, TokenTable]] = []
    merges: list[TokenTable] = []
    for table in tables:
        ledger = table.ledger
        empty = ledger.sealed_pages * table.page_size - ledger.sealed_live
        if empty < table.page_size * settings.min_gain_pages:
            continue  # nearly always: not even the empty places of a page together
        row = row_waste(table)
        counts = (row.sealed_pages, row.sealed_live)
        if wants_repack(row, settings, pressure):
            repacks.append((reachable_gain(row), table))
        elif table.merge_seen != counts and wants_merge(row, settings):
            table.merge_seen = counts
            merges.append(table)
    repacks.sort(key=lambda item: (-item[0], item[1].row))
    everything = settings.max_moved_tokens
    return [(t, everything) for _, t in repacks] + [(t, t.page_size) for t in merges]


def _with_destinations(
    chosen: Sequence[tuple[TokenTable, Int64Array, Choice]], pool: PagePool
) -> list[RepackPlan]:
    """One allocation for all rows. The pool may refuse (its count was optimistic): no plans."""
    pages = pool.allocate(sum(choice.dst_pages for _, _, choice in chosen))
    if pages is None:
        return []
    pages = np.sort(pages)
    plans: list[RepackPlan] = []
    start = 0
    for table, codes, choice in chosen:
        own = pages[start : start + choice.dst_pages]
        start += choice.dst_pages
        positions, src_slots = table.live_tokens_of(codes)
        plans.append(
            RepackPlan(
                row=table.row,
                generation=table.generation,
                record=table.record,
                page_size=table.page_size,
                positions=positions,
                src_slots=src_slots.astype(np.int32),
                source_codes=codes.astype(np.int32),
                source_pages=table.ledger.page[codes].astype(np.int64),
                dst_pages=own,
                limited=choice.limited,
            )
        )
    return plans


def make_fork(
    table: TokenTable, rows: RequestRows, pool: PagePool, new_protected_len: int
) -> RepackPlan | None:
    """Plan to copy the live tree-owned tokens of [new_protected_len, protected_len) into private
    pages, taken from the pool here; None when it has too few. Reads the row once."""
    positions = table.tree_owned_live_positions(new_protected_len)
    pages = np.zeros(0, np.int64)
    if len(positions):
        taken = pool.allocate(page_count(len(positions), table.page_size))
        if taken is None:
            return None
        pages = np.sort(taken)
    slots = rows.gather(np.full(len(positions), table.row, np.int64), positions)
    return RepackPlan(
        row=table.row,
        generation=table.generation,
        record=table.record,
        page_size=table.page_size,
        positions=positions.astype(np.int32),
        src_slots=slots.astype(np.int32),
        source_codes=np.zeros(0, np.int32),
        source_pages=np.zeros(0, np.int64),
        dst_pages=pages,
        limited=False,
        new_protected_len=new_protected_len,
    )
