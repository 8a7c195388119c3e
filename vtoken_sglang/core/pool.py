"""The engine's page allocator, as the core sees it."""

from typing import Protocol

from vtoken_sglang.core.types import Int64Array


class PagePool(Protocol):
    """Hands out pages and takes them back. Called in the scheduler thread at the safe point.

    Fields:
        page_size: slots per page.
    """

    @property
    def page_size(self) -> int: ...

    def free_pages(self) -> int:
        """Pages that `allocate` could hand out now, without evicting anything."""

    def allocate(self, pages: int) -> Int64Array | None:
        """`pages` distinct page ids >= 1, int64; None, having changed nothing, if there are not
        enough."""

    def release(self, pages: Int64Array) -> None:
        """Take pages back; each was allocated by this pool and is held by no one else."""
