"""Triton form of `apply_moves`."""

# Arguments of a kernel are tensors to Triton, not to mypy.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 512
NUM_WARPS = 4


@triton.jit(do_not_specialize=["n"])
def apply_moves_kernel(
    rows,  # in/out: int32 [num_rows, row_stride]
    row_stride,
    row_ids,  # in: int64 [n], 0 = skip
    positions,  # in: int64 [n]
    slots,  # in: int64 [n]
    n,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < n
    row = tl.load(row_ids + lane, mask=inside, other=0).to(tl.int64)
    pos = tl.load(positions + lane, mask=inside, other=0)
    slot = tl.load(slots + lane, mask=inside, other=0)
    tl.store(rows + row * row_stride + pos, slot.to(tl.int32), mask=inside & (row > 0))


def apply_moves_triton(
    rows: torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """See `apply_moves`."""
    n = row_ids.numel()
    if n:
        apply_moves_kernel[(triton.cdiv(n, BLOCK),)](
            rows,
            rows.stride(0),
            row_ids,
            positions,
            slots,
            n,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def warm_up(rows: torch.Tensor) -> None:
    """Compile every form that one upload [3, n] of lists can need, so that no request waits for it:
    with an odd n the second list does not start at a multiple of 16 bytes. Writes nothing."""
    for n in (1, 2):
        lists = torch.zeros(3, n, dtype=torch.int64, device=rows.device)
        apply_moves_triton(rows, lists[0], lists[1], lists[2])
