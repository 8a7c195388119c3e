"""How many running requests hold each tree page.

Tree pages are known by their page id: a page of the tree exists once, and every request whose lock
covers it has it in its row. That works for both of SGLang's tree cores; the Rust one shows no lock
counts. Counts change with the requests that come, go, are forked or whose prompt reaches the tree;
nothing is recounted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from vtoken_sglang.core.types import Int32Array, Int64Array
from vtoken_sglang.engine.request_state import RequestState


class PageHolders:
    """Holders of the tree pages of one pool. Scheduler thread only.

    Fields:
        total, pruning: int32 [pages + 1], by page id: requests whose lock covers the page; of
            those, the ones that may fork.
    """

    def __init__(self, rows: torch.Tensor, page_size: int, pages: int) -> None:
        """`rows`: the engine's req_to_token, int32 [num_rows, width]."""
        self._rows, self._page_size = rows, page_size
        self.total: Int32Array = np.zeros(pages + 1, np.int32)
        self.pruning: Int32Array = np.zeros(pages + 1, np.int32)

    def update(self, states: Iterable[RequestState]) -> None:
        """Take notice of what these requests' locks cover now."""
        for state in states:
            pages = state.record.cache_protected_len // self._page_size
            known = 0 if state.tree_pages is None else len(state.tree_pages)
            if pages > known:
                self._grow(state, known, pages)
            elif pages < known:
                self.cut(state, pages)

    def _grow(self, state: RequestState, known: int, pages: int) -> None:
        """The tree took over more of the prompt, or the request has just come. A row that lost
        tokens never reaches the tree again, so no page start in it is evicted yet."""
        assert state.table is None, "tree pages of a row are read before its first eviction"
        starts = slice(known * self._page_size, pages * self._page_size, self._page_size)
        entries = self._rows[state.row, starts].cpu().numpy().astype(np.int64)
        fresh = entries // self._page_size
        old = np.empty(0, np.int64) if state.tree_pages is None else state.tree_pages
        state.tree_pages = np.concatenate([old, fresh])
        self._count(state, fresh, 1)

    def cut(self, state: RequestState, pages: int) -> None:
        """The request's lock covers only its first `pages` tree pages from now on."""
        if state.tree_pages is not None:
            self._count(state, state.tree_pages[pages:], -1)
            state.tree_pages = state.tree_pages[:pages]

    def _count(self, state: RequestState, pages: Int64Array, change: int) -> None:
        self.total[pages] += change  # a path names no page twice
        if state.options.may_fork:
            self.pruning[pages] += change

    def violations(self, states: Iterable[RequestState]) -> list[str]:
        """Counts that a recount over `states` does not give; empty is healthy."""
        total, pruning = np.zeros_like(self.total), np.zeros_like(self.pruning)
        for state in states:
            if state.tree_pages is not None:
                total[state.tree_pages] += 1
                pruning[state.tree_pages] += state.options.may_fork
        wrong = np.flatnonzero((total != self.total) | (pruning != self.pruning))
        return [f"holders of tree pages {wrong[:8].tolist()} are miscounted"] if len(wrong) else []
