"""PyTorch reference of `pack_live`."""

from __future__ import annotations

import torch


def pack_live_reference(
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
    entries = rows[row_ids.long(), :max_span]
    pos = torch.arange(entries.shape[1], device=rows.device)
    live = (entries != 0) & (pos < spans.unsqueeze(1))
    found, room = live.sum(dim=1), indptr.diff()
    if lens is not None:
        lens.copy_(found)
    if bool((found > room).any()):
        live &= live.cumsum(dim=1) <= room.unsqueeze(1)
    start, end = int(indptr[0]), int(indptr[-1])
    used = torch.arange(start, end, device=rows.device)
    used = used < (indptr[:-1] + found).repeat_interleave(room)
    for out, values, sink in ((slots, entries, 0), (positions, pos.expand_as(entries), -1)):
        if out is not None:
            out[start:end] = sink
            out[start:end][used] = values[live].to(out.dtype)
