"""What must always hold, checked by recounting everything from the device rows.

Conservation: every page is, once, in one ledger, held as a destination, or with someone else.
Mapping: a live position's row entry lies in the page that claims it, at its place; an evicted
one's is 0; no slot is named twice. Counts: what the tables add up incrementally equals a recount.
(Paper, invariants I1-I4; DESIGN 3.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Int32Array, Int64Array, IntArray, RepackPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """Everything the reclaimer holds.

    Fields:
        tables: of all pruned requests, page ids read.
        pending: plans in flight of requests that run.
        abandoned: destination pages (int64) of copies in flight whose request has ended.
        evicted_counts: int32 [num_rows], what the reclaimer publishes.
    """

    tables: Sequence[TokenTable]
    pending: Sequence[RepackPlan]
    abandoned: Sequence[Int64Array]
    evicted_counts: Int32Array


def find_violations(
    holdings: Holdings,
    rows: RequestRows,
    free_pages: Int64Array | None,
    *,
    other_pages: Int64Array | None,
    total_pages: int | None,
) -> list[str]:
    """Every broken rule, named with row, position or page; see `Reclaimer.violations`."""
    found = _conservation(holdings, free_pages, other_pages, total_pages)
    for table in holdings.tables:
        found += _mapping(table, rows)
        found += _counts(table, holdings.evicted_counts)
    return found


def _conservation(
    holdings: Holdings,
    free_pages: Int64Array | None,
    other_pages: Int64Array | None,
    total_pages: int | None,
) -> list[str]:
    owners: list[tuple[str, Int64Array]] = []
    for table in holdings.tables:
        pages = table.ledger.page[table.ledger.held_codes()].astype(np.int64)
        owners.append((f"ledger of row {table.row}", pages))
    owners += [(f"repack of row {plan.row}", plan.dst_pages) for plan in holdings.pending]
    owners += [("a copy of an ended request", pages) for pages in holdings.abandoned]
    if free_pages is not None:
        owners.append(("the free list", free_pages))
    if other_pages is not None:
        owners.append(("the tree or an unpruned row", other_pages))
    found: list[str] = []
    everything = np.concatenate([pages for _, pages in owners] or [np.zeros(0, np.int64)])
    if (everything < 1).any():
        bad = [who for who, pages in owners if (pages < 1).any()]
        found.append(f"page 0 or below is claimed by {', '.join(bad)}")
    unique, times = np.unique(everything, return_counts=True)
    for page in unique[times > 1].tolist():
        who = [f"{name} x{n}" for name, pages in owners if (n := int((pages == page).sum()))]
        found.append(f"page {page} is claimed more than once: {', '.join(who)}")
    if free_pages is not None and other_pages is not None and total_pages is not None:
        leaked = np.setdiff1d(np.arange(1, total_pages + 1), unique)
        if len(leaked):
            found.append(f"pages claimed by no one: {_some(leaked)}")
        if (unknown := unique[unique > total_pages]).size:
            found.append(f"pages beyond the pool's {total_pages}: {_some(unknown)}")
    return found


def _mapping(table: TokenTable, rows: RequestRows) -> list[str]:
    name = f"row {table.row}"
    found: list[str] = []
    entries = rows.read(table.row, 0, table.logical_len)
    positions = np.arange(table.logical_len)
    alive = table.alive(positions)
    if (unzeroed := positions[~alive & (entries != 0)]).size:
        found.append(f"{name}: evicted positions with a slot in the row: {_some(unzeroed)}")
    if (lost := positions[alive & (entries == 0)]).size:
        found.append(f"{name}: live positions with no slot in the row: {_some(lost)}")
    private = positions[table.protected_len :]
    wanted = table.slots_of(private)
    if (wrong := private[alive[private] & (entries[private] != wanted)]).size:
        found.append(f"{name}: row entries outside their ledger page: {_some(wrong)}")
    slots, times = np.unique(entries[entries != 0], return_counts=True)
    if (twice := slots[times > 1]).size:
        found.append(f"{name}: slots named twice: {_some(twice)}")
    if (entries < 0).any():
        found.append(f"{name}: negative row entries")
    device_live = int((entries != 0).sum())
    if device_live != table.live_len:
        found.append(f"{name}: {device_live} live on the device, {table.live_len} on the host")
    return found


def _counts(table: TokenTable, evicted_counts: Int32Array) -> list[str]:
    name, ledger = f"row {table.row}", table.ledger
    found: list[str] = []
    held = ledger.held_codes()
    positions, slots = table.live_tokens_of(held)
    recounted = len(positions)
    alive = table.alive(np.arange(table.logical_len))
    private_live = int(alive.sum()) - int(table.tree_owned_live())
    if recounted != private_live:
        found.append(f"{name}: {private_live} live private tokens, pages hold {recounted}")
    in_page = np.bincount(slots // table.page_size, minlength=int(ledger.page.max(initial=0)) + 1)
    for code in held[in_page[ledger.page[held]] != ledger.live[held]].tolist():
        page, live = int(ledger.page[code]), int(ledger.live[code])
        found.append(f"{name}: page {page} counts {live} live, has {in_page[page]}")
    sealed = held[held < ledger.sealed_original]
    sums = {
        "evicted": (table.evicted, int((~alive).sum())),
        "evicted_counts": (int(evicted_counts[table.row]), table.evicted),
        "live_tokens": (ledger.live_tokens, recounted),
        "pages_held": (ledger.pages_held, len(held)),
        "sealed_pages": (ledger.sealed_pages, len(sealed)),
        "sealed_live": (ledger.sealed_live, int(ledger.live[sealed].sum())),
    }
    for field, (kept, counted) in sums.items():
        if kept != counted:
            found.append(f"{name}: {field} is {kept}, recount gives {counted}")
    return found


def _some(values: IntArray, limit: int = 8) -> str:
    shown = ", ".join(str(value) for value in values[:limit].tolist())
    return shown + (f", ... ({len(values)} in all)" if len(values) > limit else "")
