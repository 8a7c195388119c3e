"""SGLang's token-to-KV allocator seen as a pool of whole pages (`core.reclaimer.PagePool`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class AllocatorPagePool:
    """Pages of one SGLang allocator (`TokenToKVPoolAllocator` or `PagedTokenToKVPoolAllocator`).

    Every call happens in the scheduler thread between forwards, outside a free group, so the
    allocator's own lists are the truth at once.
    """

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self.page_size: int = allocator.page_size

    def free_pages(self) -> int:
        """Pages that can be allocated now, without evicting from the radix tree."""
        return int(self._allocator.available_size()) // self.page_size

    def allocate(self, pages: int) -> NDArray[np.int64] | None:
        """Take `pages` whole pages; their ids int64 [pages], or None when there are not enough."""
        self._assert_settled()
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
        self._allocator.free_page_ids(torch.from_numpy(pages).to(self._allocator.device))

    def free_page_ids(self) -> NDArray[np.int64]:
        """Ids of all free pages, for invariant checks."""
        return self._allocator.get_all_free_pages().cpu().numpy().astype(np.int64)

    def _assert_settled(self) -> None:
        assert self._allocator.free_group is None, "the allocator is inside a free group"
