"""A stand-in for the engine's KV memory, in which every token's K/V rows carry unique bytes.

A row of K/V that was moved is found where it went by its bytes, and a row that was overwritten is
noticed. Allocation follows the engine's rules: fill the tail page first, then whole pages.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Pages = npt.NDArray[np.int64]


class ListPool:
    """A page pool over a list, last in first out, so that a page given back is reused at once.
    Refuses to take back a page it did not lend."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.total = pages
        self.free = list(range(1, pages + 1))

    def free_pages(self) -> int:
        return len(self.free)

    def allocate(self, pages: int) -> Pages | None:
        if pages > len(self.free):
            return None
        kept = len(self.free) - pages
        taken, self.free = self.free[kept:], self.free[:kept]
        return np.array(taken[::-1], np.int64)

    def release(self, pages: Pages) -> None:
        back = pages.tolist()
        bad = [page for page in back if page < 1 or page in self.free or back.count(page) > 1]
        if bad:
            raise AssertionError(f"double free of {bad}")
        self.free.extend(pages.tolist())

    def free_array(self) -> Pages:
        return np.array(self.free, np.int64)


class MarkedRows:
    """Row table, K/V buffers and pool, with one distinct byte pattern per written token.

    Fields:
        rows: int32 [num_rows, width], 0 = evicted or never used.
        buffers: K and V of `layers` layers, [num_slots, 1, 4], float16 and float32 mixed.
        pool: every page but the sink's.
    """

    def __init__(
        self, *, page_size: int, pages: int, num_rows: int = 8, width: int = 512, layers: int = 2
    ) -> None:
        slots = (pages + 1) * page_size
        self.page_size = page_size
        self.rows = torch.zeros(num_rows, width, dtype=torch.int32)
        dtypes = [torch.float32, torch.float16]
        self.buffers = [torch.zeros(slots, 1, 4, dtype=dtypes[i % 2]) for i in range(2 * layers)]
        self._bytes = [b.view(torch.uint8).view(slots, -1).numpy() for b in self.buffers]
        self.pool = ListPool(pages, page_size)
        self._random = np.random.default_rng(7)

    def grow(self, row: int, known: int, length: int) -> bool:
        """Give positions [known, length) of a row slots by the engine's rules and write their K/V.
        False, having changed nothing, if the pool cannot."""
        size = self.page_size
        missing = -(-length // size) - -(-known // size)
        pages = self.pool.allocate(missing)
        if pages is None:
            return False
        tail = -known % size
        slots = (pages[:, None] * size + np.arange(size)).ravel()
        if tail:
            last = int(self.rows[row, known - 1])
            slots = np.concatenate([last + 1 + np.arange(tail), slots])
        slots = slots[: length - known]
        self.rows[row, known:length] = torch.from_numpy(slots.astype(np.int32))
        self.write(slots)
        return True

    def write(self, slots: Pages) -> None:
        """New unique bytes at these slots, in every buffer."""
        for view in self._bytes:
            view[slots] = self._random.integers(0, 256, (len(slots), view.shape[1]), np.uint8)

    def digests(self, slots: Sequence[int] | Pages) -> list[bytes]:
        """Hash of each slot's bytes over all buffers."""
        index = np.asarray(slots, np.int64)
        joined = np.concatenate([view[index] for view in self._bytes], axis=1)
        return [hashlib.blake2b(line.tobytes(), digest_size=8).digest() for line in joined]

    def page_digests(self, page: int) -> list[bytes]:
        """Hash of every slot of a page."""
        return self.digests(np.arange(page * self.page_size, (page + 1) * self.page_size))

    def live(self, row: int, length: int) -> dict[int, bytes]:
        """What attention would see of a row: position -> hash of the bytes its slot holds."""
        entries = self.rows[row, :length].numpy()
        positions = np.flatnonzero(entries)
        return dict(zip(positions.tolist(), self.digests(entries[positions]), strict=True))
