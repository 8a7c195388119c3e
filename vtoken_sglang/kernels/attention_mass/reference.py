"""PyTorch reference of `attention_mass`."""

from __future__ import annotations

import torch


def attention_mass_reference(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    row_ids: torch.Tensor,
    lse: torch.Tensor,
    scores: torch.Tensor,
    *,
    scale: float,
    below_uniform: torch.Tensor | None = None,
) -> None:
    """See `attention_mass`. Reads the lengths on the host; works in the dtype of `scores`."""
    group = q.shape[1] // k_buffer.shape[1]
    bounds, queries = indptr.tolist(), qo_indptr.tolist()
    for lane in range(len(bounds) - 1):
        row, begin, end = int(row_ids[lane]), bounds[lane], bounds[lane + 1]
        first, last = queries[lane], queries[lane + 1]
        if row == 0 or first == last:
            continue
        keys = rows_of(k_buffer, slots[begin:end].long()).to(scores.dtype)
        keys = keys.repeat_interleave(group, dim=1)
        logits = torch.einsum("qhd,khd->qhk", q[first:last].to(scores.dtype), keys) * scale
        weights = torch.exp(logits - lse[first:last, :, None].to(scores.dtype))
        sees = torch.arange(end - begin - (last - first), end - begin, device=q.device)
        entry = torch.arange(end - begin, device=q.device)
        pos = positions[begin:end].long()
        seen = (entry[None, :] <= sees[:, None]) & (pos >= 0)[None, :]
        if below_uniform is not None and int(below_uniform[lane]):
            weights = (weights < (1.0 / (sees + 1))[:, None, None]).to(scores.dtype)
        mass = weights.masked_fill(~seen[:, None], 0).sum(dim=(0, 1))
        scores[row].index_add_(0, pos[pos >= 0], mass[pos >= 0])


def rows_of(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """`buffer[slots]`; 8-bit floats as bytes, for CUDA does not index them in every torch."""
    if buffer.element_size() > 1:
        return buffer[slots]
    return buffer.view(torch.uint8)[slots].view(buffer.dtype)
