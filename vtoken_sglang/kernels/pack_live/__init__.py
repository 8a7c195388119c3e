"""`pack_live`: row -> live list, for plans whose lengths the host already knows.

Nothing depends on data: the caller gives the lengths (as `indptr`) and the output buffers, so the
host never waits and the buffers may be those of a captured graph. As a loop, for lane `b`:

    room = indptr[b + 1] - indptr[b];  found = 0
    for pos in range(spans[b]):
        slot = rows[row_ids[b], pos]
        if slot != 0:
            if found < room:
                slots[indptr[b] + found], positions[indptr[b] + found] = slot, pos
            found += 1
    lens[b] = found
    for i in range(found, room):
        slots[indptr[b] + i], positions[indptr[b] + i] = 0, -1

The last loop runs for a padding lane only: row 0 has no live entry, its one key is the sink. With
`room` = live tokens of the prefix and `spans` = logical length, the list is the prefix alone.
"""

from __future__ import annotations

import torch

from vtoken_sglang.kernels.pack_live.reference import pack_live_reference


def pack_live(
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
    """Write the live slots of each lane's row, in logical order, into a CSR list.

    All tensors are on one device.

    Args:
        rows: in, the engine's row table, int32 [num_rows, width], unit stride in a row; 0 =
            evicted.
        row_ids: in, integer [>= bs], row of each lane.
        spans: in, integer [bs], how far to walk each row, at most `max_span`.
        indptr: in, int32 [bs + 1], where each lane's list begins: cumulative live lengths.
        slots: out, int32 or int64, [>= indptr[-1]]; entries past `indptr[-1]` are left alone.
        positions: out, int32, same room as `slots`: the position of each entry, -1 for the sink.
        lens: out, int32 [bs], live entries found in the span; equals the room of the lane unless
            host and device disagree.
        max_span: bound of `spans` that the host knows, at most the width of `rows`.
    """
    if rows.is_cuda:
        from vtoken_sglang.kernels.pack_live.triton import pack_live_triton

        kernel = pack_live_triton
    else:
        kernel = pack_live_reference
    kernel(rows, row_ids, spans, indptr, slots, positions, lens, max_span=max_span)
