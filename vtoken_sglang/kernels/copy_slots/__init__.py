"""`copy_slots`: copy K/V rows between slots, in all layers; checks, then what fits the device.

Long runs are gathered in place on the CPU, one Triton launch serves all buffers on CUDA, other
devices run the reference.
"""

from collections.abc import Sequence

import torch

from vtoken_sglang.kernels.copy_slots.cpu import copy_slots_cpu
from vtoken_sglang.kernels.copy_slots.reference import copy_slots_reference


def copy_slots(
    buffers: Sequence[torch.Tensor], src_slots: torch.Tensor, dst_slots: torch.Tensor
) -> None:
    """For every buffer and i: `buffer[dst_slots[i]] = buffer[src_slots[i]]`.

    Args:
        buffers: in/out, [num_slots, heads, dim] each, contiguous, one device: K and V of every
            layer.
        src_slots, dst_slots: in, int64 [n] on that device; n = 0 does nothing. Precondition, not
            checked: within range, sources and destinations disjoint, destinations distinct.

    Raises:
        ValueError: slots of another dtype, shape or device, or a buffer that is not contiguous.
    """
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        if slots.dtype != torch.int64 or slots.dim() != 1:
            raise ValueError(f"{name}: int64 [n], got {slots.dtype} {tuple(slots.shape)}")
    if src_slots.shape != dst_slots.shape:
        got = f"{len(src_slots)} and {len(dst_slots)}"
        raise ValueError(f"src_slots and dst_slots: same length, got {got}")
    if not buffers or not len(src_slots):
        return
    device = buffers[0].device
    if src_slots.device != device or dst_slots.device != device:
        raise ValueError(f"slots: on the buffers' device {device}, got {src_slots.device}")
    for buffer in buffers:
        if not buffer.is_contiguous():
            raise ValueError(f"buffers: contiguous, got strides {buffer.stride()}")
    if device.type == "cuda":
        from vtoken_sglang.kernels.copy_slots.triton import copy_slots_triton

        copy_slots_triton(buffers, src_slots, dst_slots)
    elif device.type == "cpu":
        copy_slots_cpu(buffers, src_slots, dst_slots)
    else:
        copy_slots_reference(buffers, src_slots, dst_slots)
