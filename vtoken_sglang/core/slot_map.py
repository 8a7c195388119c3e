"""The slot map: which slots one forward's attention reads, and how long each lane is.

Built once per forward and shared by all layers. Logical lengths and RoPE positions are not its
business: they stay as the engine set them. Only the index lists and the key/value lengths of the
attention kernels come from here.

    logical row   17 18  0  0 21 | 40 41      (0 = dead; 40 41 = tokens of this forward)
    direct        17 18  0  0 21   40 41      kv_len 7, prefix_len 5
    live          17 18 21         40 41      kv_len 5, prefix_len 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from vtoken_sglang.kernels.pack_slots import pack_slots
from vtoken_sglang.kernels.packed_slots import PackedSlots

SlotMapMode = Literal["direct", "live"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMap:
    """What each lane of a batch reads in one forward.

    Fields:
        packed: slots per lane, prefix first, then the forward's own tokens.
        own_lens: tokens each lane computes in this forward (its query length), shape [bs],
            int64, the row table's device.

    Invariants:
        Own tokens are alive, so `packed.lens >= own_lens`, and query token `i` of a lane sees
        exactly the first `prefix_lens + i + 1` entries of its list.
    """

    packed: PackedSlots
    own_lens: torch.Tensor

    @property
    def kv_lens(self) -> torch.Tensor:
        """Live keys per lane including the own tokens, shape [bs], int64."""
        return self.packed.lens

    @property
    def prefix_lens(self) -> torch.Tensor:
        """Live keys per lane before the own tokens (the causal offset), shape [bs], int64."""
        return self.packed.lens - self.own_lens


def build_slot_map(
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    own_lens: torch.Tensor | None = None,
    *,
    mode: SlotMapMode,
) -> SlotMap:
    """Read a batch's rows into a slot map.

    Args:
        rows: the engine's row table, shape [num_rows, width], int32; 0 means dead.
        row_ids: row of each lane, shape [bs], int64.
        seq_lens: logical length of each lane including its own tokens, shape [bs], integer.
        own_lens: tokens each lane computes in this forward, shape [bs], integer; None means one
            each (decode).
        mode: "direct" takes the row as it is; "live" drops dead entries.

    Returns:
        The map. It holds copies: later changes of the rows do not reach it.
    """
    own = torch.ones_like(seq_lens) if own_lens is None else own_lens
    packed = pack_slots(rows, row_ids, seq_lens, own, drop_evicted=mode == "live")
    return SlotMap(packed=packed, own_lens=own.to(torch.int64))
