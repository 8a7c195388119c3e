"""PyTorch twin of the `copy_slots` kernel; the definition the Triton kernel is tested against."""

from collections.abc import Sequence

import torch


def copy_slots_ref(
    buffers: Sequence[torch.Tensor], src_slots: torch.Tensor, dst_slots: torch.Tensor
) -> None:
    """For every buffer and i: `buffer[dst_slots[i]] = buffer[src_slots[i]]`.

    Args:
        buffers: in/out, [num_slots, heads, dim] each, any dtype: K and V of every layer.
        src_slots, dst_slots: in, int64 [n], on the buffers' device; disjoint, dst distinct.
    """
    for buffer in buffers:
        buffer.index_copy_(0, dst_slots, buffer.index_select(0, src_slots))
