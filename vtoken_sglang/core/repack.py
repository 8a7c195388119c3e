"""From tables to plans: repacks (asks the planner row by row, within headroom) and forks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from vtoken_sglang.core.plan import RepackPlan
from vtoken_sglang.core.planner import (
    Choice,
    RowWaste,
    choose_sources,
    reachable_gain,
    wants_merge,
    wants_repack,
)
from vtoken_sglang.core.pool import PagePool
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.settings import ReclaimSettings
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Int64Array, page_count

_MAX_MISSES: Final = 32
"""Rows looked at in vain per step, when what is left of the limits is too little for them."""
_MIN_WINDOW: Final = 1024
_WINDOW_PER_PAGE: Final = 4
"""Pages looked at per page that the token limit lets a plan fill: enough to pick empty ones."""


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
    """Rows to plan for, each with the most tokens it may copy: repacks that return the most pages
    first, merges last. A merge is looked for once per change of the row's counts."""
    repacks: list[tuple[int, TokenTable]] = []
    merges: list[TokenTable] = []
    for table in tables:
        ledger = table.ledger
        empty = ledger.sealed_pages * table.page_size - ledger.sealed_live
        if empty < table.page_size * settings.min_gain_pages:
            continue  # most rows, most steps: not even the empty places of a page together
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
