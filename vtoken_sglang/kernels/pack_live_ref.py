"""PyTorch reference of `pack_live`."""

from __future__ import annotations

import torch


def pack_live_ref(
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    spans: torch.Tensor,
    indptr: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor | None = None,
    lens: torch.Tensor | None = None,
    *,
    max_span: int,
) -> None:
    """See `pack_live`. Reads `indptr` on the host."""
    table = rows[row_ids.long(), :max_span].long()
    pos = torch.arange(table.shape[1], device=rows.device).expand_as(table)
    live = (pos < spans.unsqueeze(1)) & (table != 0)
    rank = live.cumsum(dim=1) - 1
    room = (indptr[1:] - indptr[:-1]).unsqueeze(1)
    kept = live & (rank < room)
    target = (indptr[:-1].unsqueeze(1) + rank)[kept]
    start, end = int(indptr[0]), int(indptr[-1])
    for out, values, empty in ((slots, table, 0), (positions, pos, -1)):
        if out is not None:
            out[start:end] = empty
            out[target] = values[kept].to(out.dtype)
    if lens is not None:
        lens.copy_(live.sum(dim=1))
