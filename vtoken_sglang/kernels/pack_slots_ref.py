"""PyTorch reference of `pack_slots`."""

from __future__ import annotations

import torch

from vtoken_sglang.kernels.packed_slots import PackedSlots


def pack_slots_ref(
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    spans: torch.Tensor,
    own_lens: torch.Tensor,
    *,
    drop_evicted: bool = True,
) -> PackedSlots:
    """See `pack_slots`."""
    width = int(spans.max()) if spans.numel() else 0
    table = rows[row_ids, :width]
    pos = torch.arange(width, device=rows.device)
    keep = pos < spans.unsqueeze(1)
    if drop_evicted:
        own = pos >= (spans - own_lens).unsqueeze(1)
        keep &= (table != 0) | own
    lens = keep.sum(dim=1)
    indptr = torch.zeros(lens.numel() + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(lens, dim=0, out=indptr[1:])
    return PackedSlots(indptr=indptr, slots=table[keep].long(), lens=lens)
