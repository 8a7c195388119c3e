"""Copy K/V rows between slots, in all layers: checks, then the fastest form for the device.

Every form has the signature of its reference `copy_slots_ref`: indexed runs on the host, one Triton
launch for all buffers on CUDA; devices without an entry in `_FORMS` run the reference.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch

from vtoken_sglang.kernels.copy_slots_cpu import copy_slots_cpu
from vtoken_sglang.kernels.copy_slots_ref import copy_slots_ref

CopyForm: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]


def _copy_slots_cuda(
    buffers: Sequence[torch.Tensor], src_slots: torch.Tensor, dst_slots: torch.Tensor
) -> None:
    """Imports Triton at the first copy: it is not there on every machine."""
    from vtoken_sglang.kernels.triton_copy_slots import copy_slots_triton

    copy_slots_triton(buffers, src_slots, dst_slots)


_FORMS: Final[dict[str, CopyForm]] = {"cpu": copy_slots_cpu, "cuda": _copy_slots_cuda}


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
    _FORMS.get(device.type, copy_slots_ref)(buffers, src_slots, dst_slots)
