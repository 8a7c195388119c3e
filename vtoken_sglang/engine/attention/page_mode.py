"""Page-mode plans: FlashInfer over page lists instead of slot lists, where rows are dense.

SGLang plans FlashInfer with page size 1: one index per token. Where every live list of a batch is
whole pages in order, all full but the last, the same attention can be planned with the real page
size, a P-th of the indices. The output is the same; whether it is faster is for a measurement on
the GPU to say, so it is an option and off by default.

    slots   [32 33 .. 47] [80 81 .. 95] [64 65 66]     P = 16
    pages   [2]           [5]           [4]            last page length 3
"""

from __future__ import annotations

from typing import Any

import torch


class PageModeWrapper:
    """Around one eager FlashInfer wrapper: plans pages or slots, as `plans_pages` says.

    SGLang calls `begin_forward` with a slot plan; in page mode it is turned into a page plan.
    `forward` then shows the kernel the same pool in pages. Both go on in the mode of the last
    `begin_forward`.

    Fields:
        plans_pages: mode of the next plan; the caller vouches that its lists are dense.
    """

    def __init__(self, wrapper: Any, page_size: int) -> None:
        self.plans_pages = False
        self._wrapper = wrapper
        self._page_size = page_size
        self._planned_pages = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Always False in practice: only eager wrappers are put in here."""
        return bool(self._wrapper.is_cuda_graph_enabled)

    def begin_forward(self, *plan: Any, **options: Any) -> None:
        """Take SGLang's slot plan: [qo_indptr,] kv_indptr, kv_indices, last_page_len, three head
        sizes, page size 1, options."""
        self._planned_pages = self.plans_pages
        if not self.plans_pages:
            self._wrapper.begin_forward(*plan, **options)
            return
        *queries, kv_indptr, kv_indices, _, q_heads, kv_heads, head_dim, page_size = plan
        assert page_size == 1, "SGLang plans slots"
        pages = to_pages(kv_indptr, kv_indices, self._page_size)
        sizes = (q_heads, kv_heads, head_dim, self._page_size)
        self._wrapper.begin_forward(*queries, *pages, *sizes, **options)

    def forward(self, q: torch.Tensor, kv_cache: Any, **options: Any) -> Any:
        """Attention of the last plan."""
        return self._wrapper.forward(q, self._shown(kv_cache), **options)

    def forward_return_lse(self, q: torch.Tensor, kv_cache: Any, **options: Any) -> Any:
        """Attention and log-sum-exp of the last plan."""
        return self._wrapper.forward_return_lse(q, self._shown(kv_cache), **options)

    def _shown(self, kv_cache: tuple[torch.Tensor, torch.Tensor]) -> Any:
        """K and V as [pages, page_size, heads, dim] in page mode."""
        if not self._planned_pages:
            return kv_cache
        return tuple(buffer.view(-1, self._page_size, *buffer.shape[-2:]) for buffer in kv_cache)


def to_pages(
    indptr: torch.Tensor, slots: torch.Tensor, page_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn dense slot lists into page lists.

    Waits for the device once, as FlashInfer's own eager plan does; since the page indptr comes
    back on the host, that plan does not have to.

    Args:
        indptr: int32 [bs + 1], where each lane's slots begin.
        slots: int32 [>= indptr[-1]], dense lists.
        page_size: slots of a page.

    Returns:
        (page indptr, int32 [bs + 1], host; pages, int32, device of `slots`; entries of each
        lane's last page, int32 [bs], host, 0 for an empty lane).
    """
    starts = indptr.to("cpu", torch.int64)
    lens = starts.diff()
    counts = (lens + page_size - 1) // page_size
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    lane_starts = torch.repeat_interleave(starts[:-1] - ends[:-1] * page_size, counts)
    firsts = lane_starts + torch.arange(int(ends[-1])) * page_size
    pages = slots[firsts.to(slots.device)] // page_size
    last = lens - (counts - 1).clamp(min=0) * page_size
    return ends.to(torch.int32), pages, last.to(torch.int32)
