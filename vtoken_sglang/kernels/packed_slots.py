"""The list a row packs into: the slots that attention reads, lane by lane."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSlots:
    """Live slots of a batch of lanes, in logical order, as a CSR list.

    Fields:
        indptr: first entry of each lane in `slots`, shape [bs + 1], int64, row's device.
        slots: slots to read, shape [indptr[-1]], int64, row's device; 0 is the sink.
        lens: entries per lane (the live lengths), shape [bs], int64, row's device.
    """

    indptr: torch.Tensor
    slots: torch.Tensor
    lens: torch.Tensor
