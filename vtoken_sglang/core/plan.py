"""Plain data that crosses stages: what to move (plan) and what a step did (report)."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from vtoken_sglang.core.types import Generation, Int32Array, Int64Array, Row

NEVER_REPACKED: Final = -1.0
"""Waste after the last repack where there was none, so that the hysteresis holds nothing back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackPlan:
    """Move every live token of some pages of one row into new private pages.

    A repack empties sealed private pages into fewer ones. A fork (copy-on-write) copies live tokens
    out of tree-owned pages, which stay as they are: it has no source pages of its own to free.

    Token i of the plan (in ascending position order) goes to place i of the destinations, page
    after page, so every destination is full except perhaps the last.

    Fields:
        row, generation, record: identity of the request when the plan was made; all three must
            still hold at the commit.
        positions: int32 [n], ascending, the tokens that were alive.
        page_size: tokens per page.
        src_slots: int32 [n], where each token's K/V is.
        source_codes: int32 [s], the table's names of the pages that are emptied; none for a fork.
        source_pages: int64 [s], their page ids; they return to the pool at the commit.
        dst_pages: int64 [d], d < s unless it is a fork, taken from the pool when the plan is made
            and held until the copy's fence has passed.
        limited: a limit cut the plan short; the next look need not wait for the hysteresis.
        new_protected_len: where the tree-owned part of the row ends after a fork's commit (page
            multiple); None for a repack.
    """

    row: Row
    generation: Generation
    record: object
    page_size: int
    positions: Int32Array
    src_slots: Int32Array
    source_codes: Int32Array
    source_pages: Int64Array
    dst_pages: Int64Array
    limited: bool
    new_protected_len: int | None = None

    @property
    def dst_slots(self) -> Int64Array:
        """Where each token's K/V goes, int64 [n]: the places of `dst_pages`, page after page."""
        places = self.dst_pages[:, None] * self.page_size + np.arange(self.page_size)
        return places.ravel()[: len(self.positions)]

    @property
    def gain(self) -> int:
        """Pages the row holds less after the commit."""
        return len(self.source_pages) - len(self.dst_pages)

    def metadata_bytes(self) -> int:
        """Host bytes of the plan's arrays."""
        arrays = (self.positions, self.src_slots, self.source_codes, self.source_pages)
        return sum(a.nbytes for a in arrays) + self.dst_pages.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one safe point did. All counts are of this step only, except the last two.

    Forks count in `committed`, `dropped` and `moved_tokens` as repacks do.

    Fields:
        committed, dropped: plans whose commit took place / that were given up.
        moved_tokens: tokens whose row entry was committed to a new slot.
        freed_empty_pages: pages given back because no token in them was alive.
        freed_source_pages: pages given back by commits.
        submitted, submitted_tokens, taken_pages: repacks started, their tokens, and the
            destination pages taken from the pool for them.
        pending: repacks in flight after this step.
        held_pages: destination pages held after this step (pending and orphaned copies).
        forked: (row, new tree-owned length) of forks that were committed: the engine gives up its
            lock on the tree's pages above that length, in this safe point.
    """

    committed: int = 0
    dropped: int = 0
    moved_tokens: int = 0
    freed_empty_pages: int = 0
    freed_source_pages: int = 0
    submitted: int = 0
    submitted_tokens: int = 0
    taken_pages: int = 0
    pending: int = 0
    held_pages: int = 0
    forked: tuple[tuple[Row, int], ...] = ()
