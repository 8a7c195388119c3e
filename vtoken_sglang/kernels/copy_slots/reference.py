"""PyTorch reference of the `copy_slots` kernels; the definition they are tested against."""

from collections.abc import Sequence

import torch

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def row_words(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as [num_slots, words], in the widest integers that divide a row: a copy of
    bytes, for every dtype alike (float8 has no indexed copy of its own)."""
    rows = buffer.view(buffer.shape[0], -1)
    row_bytes = rows.shape[1] * rows.element_size()
    return rows.view(next(word for word in _WORDS if row_bytes % word.itemsize == 0))


def copy_slots_reference(
    buffers: Sequence[torch.Tensor], src_slots: torch.Tensor, dst_slots: torch.Tensor
) -> None:
    """For every buffer and i: `buffer[dst_slots[i]] = buffer[src_slots[i]]`.

    Args:
        buffers: in/out, [num_slots, heads, dim] each, contiguous, any dtype.
        src_slots, dst_slots: in, int64 [n], on the buffers' device; disjoint, dst distinct.
    """
    for buffer in buffers:
        words = row_words(buffer)
        words.index_copy_(0, dst_slots, words.index_select(0, src_slots))
