"""Where every token of one pruned request is: (row, pos) -> slot, and whether it is alive.

    row:  | tree-owned, only ever masked | private: pages in the ledger            | open tail |
          0                        protected_len                          open_start   logical_len

The engine's row on the device is the table attention reads; this is its host mirror. A mirror of
slots would have to be read back from the device for every new token. Instead a token's `place` is
kept: ORIGINAL (where the engine put it: page of its position, offset pos % page_size), EVICTED, or
a place in a compacted page. Only one number per page, its id, ever comes from the device.

Paper names: `evict_token(s)`, `sync_new_tokens`, `apply_moves` (arXiv 2608.13263, section 4).

A copy-on-write fork moves the live tree-owned tokens of [new_protected_len, protected_len) into
compacted pages and lowers `protected_len` in the same commit. A compacted page may hold any
positions, and original codes are counted from `first_original`, which a fork leaves alone.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from vtoken_sglang.core.ledger import PageLedger
from vtoken_sglang.core.types import (
    NEVER_REPACKED,
    BoolArray,
    Generation,
    Int32Array,
    Int64Array,
    IntArray,
    PositionError,
    RepackPlan,
    Row,
    page_count,
    page_floor,
)
from vtoken_sglang.errors import StalePlanError

_EVICTED: Final = 0
_ORIGINAL: Final = -1


class TokenTable:
    """Token table of one request, alive from its first eviction until it ends.

    Fields:
        row, generation, record: identity of the request (`record` is compared with `is`).
        protected_len: positions below it are tree-owned (page multiple); never in the ledger.
        first_original: page number (position // page_size) of the ledger's code 0.
        page_size: tokens per page.
        logical_len: positions known; each has had a slot.
        evicted: evicted positions, masked ones included; live length = logical_len - evicted.
        ledger: the private pages.
        repacked_waste: waste of the sealed pages right after the last commit (hysteresis).
        merge_seen: (sealed pages, live tokens in them) when a merge was last tried.
        _place: int32 [capacity], host: per position 0 (evicted), -1 (original), or where it lies in
            a compacted page: -code * page_size + offset, at least page_size.
    """

    __slots__ = (
        "_place",
        "evicted",
        "first_original",
        "generation",
        "ledger",
        "logical_len",
        "merge_seen",
        "page_size",
        "protected_len",
        "record",
        "repacked_waste",
        "row",
    )

    def __init__(
        self,
        *,
        row: Row,
        generation: Generation,
        record: object,
        page_size: int,
        protected_len: int,
        logical_len: int,
        pages: Int64Array,
    ) -> None:
        """`pages`: int64, ids of the private pages in position order, the tail's included."""
        if protected_len % page_size or not 0 <= protected_len <= logical_len:
            rule = f"a page multiple between 0 and logical_len {logical_len}"
            raise PositionError("protected_len", rule, protected_len)
        private = logical_len - protected_len
        if len(pages) != page_count(private, page_size):
            raise PositionError("pages", f"one page per {page_size} private tokens", len(pages))
        self.row, self.generation, self.record = row, generation, record
        self.page_size, self.protected_len = page_size, protected_len
        self.first_original = protected_len // page_size
        self.logical_len = logical_len
        self.evicted = 0
        self.repacked_waste = NEVER_REPACKED
        self.merge_seen = (0, 0)
        self._place: Int32Array = np.zeros(logical_len + max(16, logical_len >> 3), np.int32)
        self._place[:logical_len] = _ORIGINAL
        self.ledger = PageLedger(page_size)
        if private:
            self.ledger.add_original(len(pages), private)
            self.ledger.set_unread(pages)

    # -- the engine's side ----------------------------------------------------------------------

    def sync_new_tokens(self, logical_len: int) -> None:
        """Positions [self.logical_len, logical_len) were appended by the engine, all alive.

        Raises PositionError if the length shrank. No device read: new pages stay UNREAD.
        """
        known = self.logical_len
        if logical_len <= known:
            if logical_len < known:
                raise PositionError("logical_len", f"not below the known {known}", logical_len)
            return
        if logical_len > len(self._place):
            grown = np.zeros(logical_len + max(16, logical_len >> 3), np.int32)
            grown[:known] = self._place[:known]
            self._place = grown
        self._place[known:logical_len] = _ORIGINAL
        self.logical_len = logical_len
        size = self.page_size
        room = -known % size
        to_tail = min(room, logical_len - known)
        if to_tail:
            self.ledger.extend_tail(to_tail)
        rest = logical_len - known - to_tail
        if rest:
            self.ledger.add_original(page_count(rest, size), rest)

    def unread_start(self) -> int:
        """First position of the first page whose id was not read yet; from here on every page
        start up to `logical_len` is to be read, and is still alive in the row."""
        return (self.ledger.read_len + self.first_original) * self.page_size

    def set_unread(self, slots: IntArray) -> None:
        """Row entries at the next page starts from unread_start() on, from the device."""
        self.ledger.set_unread(slots // self.page_size)

    @property
    def open_start(self) -> int:
        """First position of the open tail page, the page of the last known position."""
        return page_floor(self.logical_len - 1, self.page_size)

    @property
    def live_len(self) -> int:
        """Tokens attention sees."""
        return self.logical_len - self.evicted

    def seal(self, sealed_upto: int) -> None:
        """Positions below `sealed_upto` are written and in full pages no forward writes."""
        if sealed_upto > self.logical_len:
            rule = f"at most the known length {self.logical_len}"
            raise PositionError("sealed_upto", rule, sealed_upto)
        self.ledger.seal(sealed_upto // self.page_size - self.first_original)

    # -- evictions ------------------------------------------------------------------------------

    def evict_tokens(self, positions: IntArray | Sequence[int]) -> Int64Array:
        """Mark tokens evicted; nothing moves. Returns the positions that were alive until now.

        Positions evicted before are left alone; one in the open tail page or outside the known
        range raises PositionError and changes nothing. Below `protected_len` an eviction is a mask:
        no ledger count changes. The caller zeroes the returned entries of the row.
        """
        at = np.asarray(positions, dtype=np.int64)
        if not len(at):
            return at
        if (at[1:] <= at[:-1]).any():
            at = np.unique(at)
        if at[0] < 0 or at[-1] >= self.open_start:
            bad = at[(at < 0) | (at >= self.open_start)].tolist()
            raise PositionError("positions", f"within [0, {self.open_start})", bad)
        place = self._place[at]
        if not place.all():
            alive = place != _EVICTED
            at, place = at[alive], place[alive]
        self._place[at] = _EVICTED
        self.evicted += len(at)
        codes = self._codes(at, place)
        if self.protected_len:
            codes = codes[(at >= self.protected_len) | (place != _ORIGINAL)]
        if len(codes):
            codes.sort()
            self.ledger.evict(codes)
        return at

    def _codes(self, positions: Int64Array, place: Int32Array) -> Int64Array:
        """Ledger code per position (meaningless for tree-owned ones)."""
        original = positions // self.page_size - self.first_original
        if not (place > 0).any():
            return original
        codes: Int64Array = np.where(place == _ORIGINAL, original, -(place // self.page_size))
        return codes

    # -- reading --------------------------------------------------------------------------------

    def alive(self, positions: IntArray) -> BoolArray:
        """Whether each position is alive."""
        alive: BoolArray = self._place[positions] != _EVICTED
        return alive

    def slots_of(self, positions: IntArray) -> Int64Array:
        """Slot per private position, 0 = evicted. Pages must have been read; a position that is
        still tree-owned raises PositionError (its slot is only in the row)."""
        at = np.asarray(positions, np.int64)
        place = self._place[at]
        if ((at < self.protected_len) & (place == _ORIGINAL)).any():
            raise PositionError("positions", "private", at.tolist())
        evicted = place == _EVICTED
        codes = self._codes(at, place)
        codes[evicted] = 0
        offset = np.where(place == _ORIGINAL, at, place) % self.page_size
        slots: Int64Array = self.ledger.page[codes].astype(np.int64) * self.page_size + offset
        slots[evicted] = 0
        return slots

    def live_tokens_of(self, codes: IntArray) -> tuple[Int32Array, Int64Array]:
        """Live tokens in the pages `codes`: (positions int32 ascending, their slots int64)."""
        size = self.page_size
        offset = np.arange(size)
        compacted = codes < 0
        positions = np.empty((len(codes), size), np.int64)
        expected = np.empty((len(codes), size), np.int64)
        original = codes[~compacted]
        positions[~compacted] = ((original + self.first_original) * size)[:, None] + offset
        expected[~compacted] = _ORIGINAL
        positions[compacted] = self.ledger.compacted_positions(codes[compacted])
        expected[compacted] = (-codes[compacted].astype(np.int64) * size)[:, None] + offset
        # The open tail may end inside a page; places past the end hold no live token.
        known = np.minimum(positions, len(self._place) - 1)
        here = (self._place[known] == expected) & (positions < self.logical_len)
        slots = self.ledger.page[codes].astype(np.int64)[:, None] * size + offset
        found, at = positions[here], slots[here]
        order = np.argsort(found, kind="stable")
        return found[order].astype(np.int32), at[order]

    def tree_owned_live(self) -> int:
        """Live tokens in tree-owned pages: seen by attention, their memory not ours."""
        return int((self._place[: self.protected_len] == _ORIGINAL).sum())

    def sealed_waste(self) -> float:
        """F over the sealed pages: the part a repack can remove. The trigger looks at this, so
        that a half-written tail page does not count as waste."""
        places = self.ledger.sealed_pages * self.page_size
        return 1.0 - self.ledger.sealed_live / places if places else 0.0

    # -- the commit -------------------------------------------------------------------------------

    def apply_moves(self, plan: RepackPlan) -> tuple[Int64Array, Int64Array]:
        """Point counts, ledger and places to the plan's destinations.

        A token evicted after the plan was made stays evicted; its place in the destination stays
        empty. Returns (positions that moved, their new slots); the caller writes them to the row in
        the same safe point. The source pages are no longer held. Raises StalePlanError, having
        changed nothing, if a live token is not where the plan took it from.
        """
        positions = plan.positions.astype(np.int64)
        alive = self._still_at_source(plan, positions)
        size, count = self.page_size, len(plan.dst_pages)
        filled = np.zeros(count * size, np.int32)
        filled[: len(positions)] = positions
        live = np.zeros(count * size, np.bool_)
        live[: len(positions)] = alive
        self.ledger.remove(plan.source_codes)
        per_page = live.reshape(count, size).sum(axis=1)
        codes = self.ledger.add_compacted(plan.dst_pages, per_page, filled.reshape(count, size))
        places = (-codes * size)[:, None] + np.arange(size)
        moved_positions = positions[alive]
        self._place[moved_positions] = places.ravel()[: len(positions)][alive]
        if plan.new_protected_len is None:
            self.repacked_waste = NEVER_REPACKED if plan.limited else self.sealed_waste()
        else:
            self.protected_len = plan.new_protected_len
        return moved_positions, plan.dst_slots[alive]

    def _still_at_source(self, plan: RepackPlan, positions: Int64Array) -> BoolArray:
        """Which of the plan's tokens are alive; raises StalePlanError if one of them moved."""
        alive: BoolArray = self._place[positions] != _EVICTED
        if plan.new_protected_len is None:
            now = self.slots_of(positions)
            moved = positions[alive & (now != plan.src_slots)]
        else:
            # Tree slots do not move while the row's lock holds them, and only one plan of a row is
            # pending at a time: tokens that were all tree-owned still are.
            tree_owned = (self._place[positions] == _ORIGINAL) & (positions < self.protected_len)
            moved = positions[alive & ~tree_owned]
        if len(moved):
            where = moved.tolist()
            raise StalePlanError(f"row {self.row}: positions {where} moved since the plan was made")
        return alive

    def tree_owned_live_positions(self, start: int) -> Int64Array:
        """Live positions of [start, protected_len), ascending: what a fork from `start` copies."""
        part = self._place[start : self.protected_len] == _ORIGINAL
        found: Int64Array = np.flatnonzero(part) + start
        return found
