"""SGLang's token-to-KV allocator seen as a pool of whole pages (`core.reclaimer.PagePool`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken_sglang.kernels.upload import upload


class AllocatorPagePool:
    """Pages of one SGLang allocator (`TokenToKVPoolAllocator` or `PagedTokenToKVPoolAllocator`).

    Every call happens in the scheduler thread between forwards, outside a free group, so the
    allocator's own lists are the truth at once.

    What the radix tree holds for nobody counts as free, as it does for SGLang's own allocations: a
    server's pool is full of cached prompts most of the time. It is evicted when it is needed,
    least recently used first. Every plan returns more pages than it takes, so the cache is short
    of them only until the commit.
    """

    def __init__(self, allocator: Any, tree: Any | None = None) -> None:
        self._allocator = allocator
        self._tree = tree
        self.page_size: int = allocator.page_size
        self.total_pages: int = allocator.size // allocator.page_size

    def free_pages(self) -> int:
        """Pages that `allocate` can hand out now, evictable ones of the radix tree included."""
        evictable = self._tree.evictable_size() if self._tree is not None else 0
        return int(self._allocator.available_size() + evictable) // self.page_size

    def allocate(self, pages: int) -> NDArray[np.int64] | None:
        """Take `pages` whole pages; their ids int64 [pages], or None when there are not enough.
        Evicts from the radix tree what the free list is short of."""
        self._assert_settled()
        short = pages * self.page_size - int(self._allocator.available_size())
        if short > 0 and self._tree is not None:
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            if pages > self.free_pages():
                return None  # evicting would not be enough
            self._tree.evict(EvictParams(num_tokens=short))
        slots: torch.Tensor | None = self._allocator.alloc(pages * self.page_size)
        if slots is None:
            return None
        return (slots[:: self.page_size] // self.page_size).cpu().numpy().astype(np.int64)

    def release(self, pages: NDArray[np.int64]) -> None:
        """Give pages back. Page 0 is the sink and never ours."""
        self._assert_settled()
        if pages.size == 0:
            return
        assert int(pages.min()) > 0, "page 0 is the sink"
        self.release_at_end(pages)

    def release_at_end(self, pages: NDArray[np.int64]) -> None:
        """Give back the pages of a request that ends: often inside SGLang's free group, which keeps
        the ids until the group ends."""
        self._allocator.free_page_ids(upload(pages, self._allocator.device))

    def free_page_ids(self) -> NDArray[np.int64]:
        """Ids of all free pages, for invariant checks."""
        return self._allocator.get_all_free_pages().cpu().numpy().astype(np.int64)

    def _assert_settled(self) -> None:
        assert self._allocator.free_group is None, "the allocator is inside a free group"
