"""The pages one pruned request privately holds, and how many live tokens are in each.

From the first eviction on this ledger, not the row, says what the request must give back. A page
has a `code` (see `types.py`): original pages, filled by the engine, are numbered 0, 1, 2, ... in
position order, compacted pages, filled by a repack, -1, -2, ... Both kinds share the same arrays:
numpy reads a negative index from the end, so original pages grow from the front and compacted pages
from the back, and `live[codes]` works for any mix.

Every count is kept up to date by the change that alters it; nothing here ever walks all pages.
"""

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from vtoken_sglang.core.types import Int32Array, Int64Array, IntArray
from vtoken_sglang.errors import InvariantError

UNREAD: Final = -1
"""Page id of an original page that the engine allocated and that was not read from the row yet."""
_NOT_HELD: Final = 0
_PARTIAL: Final = 1  # state of a page on the list of partly filled ones
_RESERVED: Final = 2  # state of a source of a plan in flight
_MIN_SPARE: Final = 16


class PageLedger:
    """Private pages of one request.

    Fields:
        page_size: tokens per page.
        page: int32 [capacity], host, page id per code; 0 = not held, UNREAD = not read yet.
        live: uint16 [capacity], host, live tokens per code; 0 where not held.
        original_len, read_len: original codes known / of which the page id was read (a prefix).
        pages_held: pages this ledger owns now.
        live_tokens: live tokens in them.
        sealed_original: original codes below this are sealed (compacted pages always are).
        sealed_pages, sealed_live: held pages that are sealed, and the live tokens in them.

    Invariants: `live_tokens` is the sum of `live` over held codes; a code is in the free list of
    compacted codes, or was never used, or is held, exactly once; the list of empty pages names
    every held page without a live token once, but for the sources of a plan in flight.
    """

    __slots__ = (
        "_compacted_len",
        "_compacted_pos",
        "_empty",
        "_free_compacted",
        "_partial",
        "_state",
        "live",
        "live_tokens",
        "original_len",
        "page",
        "page_size",
        "pages_held",
        "read_len",
        "sealed_live",
        "sealed_original",
        "sealed_pages",
    )

    def __init__(self, page_size: int) -> None:
        if not 1 <= page_size <= np.iinfo(np.uint16).max:
            raise InvariantError(f"page_size: between 1 and 65535, got {page_size}")
        self.page_size = page_size
        self.page: Int32Array = np.zeros(0, np.int32)
        self.live: npt.NDArray[np.uint16] = np.zeros(0, np.uint16)
        self._state: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._compacted_pos: Int32Array = np.zeros((0, page_size), np.int32)
        self._compacted_len = 0
        self._free_compacted = array("i")
        self._partial = array("i")
        self._empty = array("i")
        self.original_len = self.read_len = 0
        self.pages_held = self.live_tokens = 0
        self.sealed_original = self.sealed_pages = self.sealed_live = 0

    # -- growth ---------------------------------------------------------------------------------

    def _reserve(self, extra: int) -> None:
        """Make room for `extra` more codes; front and back parts keep their codes."""
        capacity = len(self.page)
        wanted = self.original_len + self._compacted_len + extra
        if wanted <= capacity:
            return
        capacity = wanted + max(_MIN_SPARE, wanted >> 3)
        for name in ("page", "live", "_state"):
            old = getattr(self, name)
            new = np.zeros(capacity, old.dtype)
            new[: self.original_len] = old[: self.original_len]
            if self._compacted_len:
                new[-self._compacted_len :] = old[-self._compacted_len :]
            setattr(self, name, new)

    def add_original(self, pages: int, tokens: int) -> None:
        """Append `pages` >= 1 original pages, ids UNREAD, that together hold `tokens` tokens, all
        alive. Every page but the last is full."""
        self._reserve(pages)
        start, end = self.original_len, self.original_len + pages
        self.page[start:end] = UNREAD
        self.live[start:end] = self.page_size
        self.live[end - 1] = tokens - (pages - 1) * self.page_size
        self.original_len = end
        self.pages_held += pages
        self.live_tokens += tokens

    def extend_tail(self, tokens: int) -> None:
        """`tokens` more tokens were appended to the last original page, which has room for them."""
        self.live[self.original_len - 1] += tokens
        self.live_tokens += tokens

    def add_compacted(self, pages: Int64Array, live: IntArray, positions: Int32Array) -> Int64Array:
        """Take over filled pages. `positions`: int32 [pages, page_size]. Returns their codes."""
        count = len(pages)
        reused = min(count, len(self._free_compacted))
        fresh = count - reused
        self._reserve(fresh)
        codes = np.empty(count, np.int64)
        for i in range(reused):
            codes[i] = self._free_compacted.pop()
        codes[reused:] = -np.arange(self._compacted_len + 1, self._compacted_len + fresh + 1)
        self._compacted_len += fresh
        if self._compacted_len > len(self._compacted_pos):
            grown = self._compacted_len + (self._compacted_len >> 3)
            old = self._compacted_pos
            self._compacted_pos = np.zeros((grown, self.page_size), np.int32)
            self._compacted_pos[: len(old)] = old
        self.page[codes] = pages
        self.live[codes] = live
        self._compacted_pos[~codes] = positions
        total = int(live.sum())
        self.pages_held += count
        self.sealed_pages += count
        self.live_tokens += total
        self.sealed_live += total
        self.note(codes)
        return codes

    # -- liveness -------------------------------------------------------------------------------

    def seal(self, original_codes: int) -> None:
        """Original pages below code `original_codes` are full and no forward in flight writes
        them."""
        start = self.sealed_original
        if original_codes <= start:
            return
        self.sealed_live += int(self.live[start:original_codes].sum())
        self.sealed_pages += original_codes - start
        self.sealed_original = original_codes

    def evict(self, codes: Int64Array) -> None:
        """One live token of page `codes[i]` was evicted, for each i. `codes`: ascending, n >= 1."""
        first = np.empty(len(codes), np.bool_)
        first[0] = True
        np.not_equal(codes[1:], codes[:-1], out=first[1:])
        starts = first.nonzero()[0]
        pages = codes[starts]
        counts = np.empty_like(starts)
        np.subtract(starts[1:], starts[:-1], out=counts[:-1])
        counts[-1] = len(codes) - starts[-1]
        left = self.live[pages] - counts
        self.live[pages] = left
        self.live_tokens -= len(codes)
        self.sealed_live -= int(codes.searchsorted(self.sealed_original))
        self._list(pages, left)

    def note(self, codes: IntArray) -> None:
        """Put pages on the lists that `take_empty` and `candidates` look at, where they belong."""
        self._list(codes, self.live[codes])

    def _list(self, codes: IntArray, live: IntArray) -> None:
        state = self._state[codes]
        empty = live == 0
        if empty.any():
            listed = codes[empty & (state != _RESERVED)]
            self._empty.frombytes(listed.astype(np.int32).tobytes())
        fresh = codes[(state == 0) & ~empty & (live < self.page_size)]
        if len(fresh):
            self._state[fresh] = _PARTIAL
            self._partial.frombytes(fresh.astype(np.int32).tobytes())
            if len(self._partial) > 2 * self.pages_held + _MIN_SPARE:
                self._compact()

    @property
    def has_empty(self) -> bool:
        """Whether some page may be free of live tokens (sealed or not)."""
        return bool(self._empty)

    def take_empty(self) -> Int64Array:
        """Remove the sealed pages without a live token; returns their page ids.

        Pages not sealed yet stay listed; sources of a plan in flight go with its commit.
        """
        codes = np.frombuffer(self._empty, np.int32)
        sealed = codes < self.sealed_original
        self._empty = array("i", codes[~sealed].tolist())
        return self.remove(codes[sealed])

    def _compact(self, limit: int | None = None) -> Int32Array:
        """Drop what is no partly filled page any more from the first `limit` listed codes; those
        that stay move to the end of the list. Returns them."""
        part = self._partial[:limit]
        listed = np.unique(np.frombuffer(part, np.int32))
        held = (self.page[listed] != _NOT_HELD) & (self.live[listed] > 0)
        codes: Int32Array = listed[held & (self._state[listed] != _RESERVED)]
        del self._partial[: len(part)]
        self._partial.frombytes(codes.tobytes())
        return codes

    def candidates(self, limit: int) -> tuple[Int32Array, bool]:
        """Codes of sealed pages with some live and some empty places: what a repack can use.

        Considers no more than `limit` listed pages, those listed longest, so that a huge request
        stays cheap; the next call takes others. Also returns whether it saw all.
        """
        complete = len(self._partial) <= limit
        codes = self._compact(limit)
        sealed: Int32Array = codes[codes < self.sealed_original]
        return sealed, complete

    # -- plans in flight ------------------------------------------------------------------------

    def reserve(self, codes: IntArray) -> None:
        """`codes` are the sources of a plan: not candidates, not freed, until it is decided."""
        self._state[codes] = _RESERVED

    def unreserve(self, codes: IntArray) -> None:
        """The plan was given up: its sources are ordinary pages again."""
        self._state[codes] = 0
        self.note(codes)

    def remove(self, codes: IntArray) -> Int64Array:
        """Stop holding `codes` (sealed); returns their page ids. Raises InvariantError if one is
        not held, so that no page is given back twice."""
        pages = self.page[codes].astype(np.int64)
        if len(pages) and int(pages.min()) <= 0:
            bad = codes[pages <= 0].tolist()
            raise InvariantError(f"ledger codes {bad} are not held (or not read): freed twice?")
        live = self.live[codes]
        if live.any():
            gone = int(live.sum())
            self.sealed_live -= gone
            self.live_tokens -= gone
        self.sealed_pages -= len(codes)
        self.pages_held -= len(codes)
        self.page[codes] = _NOT_HELD
        self.live[codes] = 0
        self._state[codes] = 0
        if self._compacted_len:
            compacted = codes[codes < 0]
            self._free_compacted.frombytes(compacted.astype(np.int32).tobytes())
        return pages

    # -- views ----------------------------------------------------------------------------------

    def compacted_positions(self, codes: IntArray) -> Int32Array:
        """Position of every place of compacted pages, int32 [codes, page_size]; an evicted place
        keeps the position that was there, an unused one holds 0: ask the table whether it is still
        true."""
        positions: Int32Array = self._compacted_pos[~codes]
        return positions

    def held_codes(self) -> Int64Array:
        """Every held code, compacted (descending) after original. Walks all pages: for checks
        and for the end of a request."""
        codes = np.concatenate(
            [np.arange(self.original_len), -np.arange(1, self._compacted_len + 1)]
        )
        held: Int64Array = codes[self.page[codes] != _NOT_HELD]
        return held

    @property
    def has_unread(self) -> bool:
        """Whether some page id was not read from the row yet."""
        return self.read_len < self.original_len

    def set_unread(self, pages: IntArray) -> None:
        """Ids of the next unread original pages, as read from the row."""
        end = self.read_len + len(pages)
        if end > self.original_len or (len(pages) and int(pages.min()) < 1):
            raise InvariantError(f"pages {self.read_len} to {self.original_len}: bad ids {pages}")
        self.page[self.read_len : end] = pages
        self.read_len = end
