"""`pack_slots`: walk rows to their logical length and keep the live slots, in order.

As a loop, for lane `b`:

    for pos in range(spans[b]):
        slot = rows[row_ids[b], pos]
        if slot != 0 or pos >= spans[b] - own_lens[b] or not drop_evicted:
            append slot to lane b

The tokens that a forward computes itself (`own_lens`, the last ones of the span) are alive by
definition, so they are kept whatever the row says. That is also what gives a padding lane (row 0,
all zeros) one entry, the sink, instead of an empty softmax.
"""

from __future__ import annotations

import torch

from vtoken_sglang.kernels.pack_slots_ref import pack_slots_ref
from vtoken_sglang.kernels.packed_slots import PackedSlots


def pack_slots(
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    spans: torch.Tensor,
    own_lens: torch.Tensor,
    *,
    drop_evicted: bool = True,
) -> PackedSlots:
    """Pack the rows of a batch into one list of slots per lane.

    Args:
        rows: in, the engine's row table, shape [num_rows, width], int32; 0 means dead.
        row_ids: in, row of each lane, shape [bs], int64.
        spans: in, logical length of each lane, shape [bs], integer, at most `width`.
        own_lens: in, how many of the span's last tokens this forward computes, shape [bs],
            integer, at most `spans`.
        drop_evicted: False keeps every entry as it stands (the row read without liveness).

    Returns:
        The packed lists. A lane without live tokens and without own tokens is empty.
    """
    return pack_slots_ref(rows, row_ids, spans, own_lens, drop_evicted=drop_evicted)
