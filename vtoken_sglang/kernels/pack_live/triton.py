"""Triton kernel of `pack_live`.

    short rows (one block)   pack: count and write, one launch
    long rows                count: live entries of each (lane, block)
                             pack:  offset = sum of the counts before the block, then write

A row of 100,000 positions is read by many programs at once, where a walk by one program per lane
would take as long as the longest row.
"""

# Arguments of a kernel are tensors to Triton, not to mypy.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
NUM_WARPS = 4


@triton.jit
def count_live_kernel(
    rows,  # in: int32 [num_rows, row_stride]
    row_stride,
    row_ids,  # in: integer [bs]
    spans,  # in: integer [bs]
    counts,  # out: int32 [bs, num_blocks]
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0)
    block = tl.program_id(1)
    pos = block * BLOCK + tl.arange(0, BLOCK)
    row = rows + tl.load(row_ids + lane).to(tl.int64) * row_stride
    slot = tl.load(row + pos, mask=pos < tl.load(spans + lane), other=0)
    tl.store(counts + lane * tl.num_programs(1) + block, tl.sum((slot != 0).to(tl.int32), axis=0))


@triton.jit
def pack_live_kernel(
    rows,  # in: int32 [num_rows, row_stride]
    row_stride,
    row_ids,  # in: integer [bs]
    spans,  # in: integer [bs]
    indptr,  # in: int32 [bs + 1]
    counts,  # in: int32 [bs, num_blocks]; unused with one block
    slots,  # out: int32 or int64
    positions,  # out: int32; unused without HAS_POSITIONS
    lens,  # out: int32 [bs]; unused without HAS_LENS
    HAS_POSITIONS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    NUM_BLOCKS_POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0)
    block = tl.program_id(1)
    pos = block * BLOCK + tl.arange(0, BLOCK)
    row = rows + tl.load(row_ids + lane).to(tl.int64) * row_stride
    slot = tl.load(row + pos, mask=pos < tl.load(spans + lane), other=0)
    live = slot != 0
    rank = tl.cumsum(live.to(tl.int32), axis=0) - 1
    if ONE_BLOCK:
        total = tl.sum(live.to(tl.int32), axis=0)
    else:
        blocks = tl.arange(0, NUM_BLOCKS_POW2)
        num_blocks = tl.num_programs(1)
        count = tl.load(counts + lane * num_blocks + blocks, mask=blocks < num_blocks, other=0)
        total = tl.sum(count, axis=0)
        rank += tl.sum(tl.where(blocks < block, count, 0), axis=0)
    begin = tl.load(indptr + lane)
    room = tl.load(indptr + lane + 1) - begin
    kept = live & (rank < room)
    tl.store(slots + begin + rank, slot, mask=kept)
    if HAS_POSITIONS:
        tl.store(positions + begin + rank, pos, mask=kept)
    if block == 0:
        if HAS_LENS:
            tl.store(lens + lane, total)
        for start in range(total, room, BLOCK):
            entry = start + tl.arange(0, BLOCK)
            tl.store(slots + begin + entry, 0, mask=entry < room)
            if HAS_POSITIONS:
                tl.store(positions + begin + entry, -1, mask=entry < room)


def pack_live_triton(
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
    """See `pack_live`."""
    bs = indptr.numel() - 1
    if not bs:
        return
    num_blocks = max(1, triton.cdiv(max_span, BLOCK))
    grid = (bs, num_blocks)
    counts = indptr
    if num_blocks > 1:
        counts = torch.empty(grid, dtype=torch.int32, device=rows.device)
        count_live_kernel[grid](
            rows, rows.stride(0), row_ids, spans, counts, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    pack_live_kernel[grid](
        rows,
        rows.stride(0),
        row_ids,
        spans,
        indptr,
        counts,
        slots,
        slots if positions is None else positions,
        indptr if lens is None else lens,
        HAS_POSITIONS=positions is not None,
        HAS_LENS=lens is not None,
        ONE_BLOCK=num_blocks == 1,
        NUM_BLOCKS_POW2=triton.next_power_of_2(num_blocks),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def warm_up(
    rows: torch.Tensor,
    slots_dtype: torch.dtype,
    *,
    spans_dtype: torch.dtype = torch.int64,
    positions: bool = False,
) -> None:
    """Compile every variant that rows of this table can need, so that no request waits for it.

    The number of blocks, rounded up to a power of two, is compiled in. Reads row 0 only.

    Args:
        rows: the engine's row table, as in `pack_live`.
        slots_dtype: dtype of the lists that will be packed.
        spans_dtype: dtype of the lanes' spans.
        positions: whether positions will be listed, too.
    """
    device = rows.device
    lane = torch.zeros(1, dtype=torch.int64, device=device)
    spans = torch.zeros(1, dtype=spans_dtype, device=device)
    indptr = torch.zeros(2, dtype=torch.int32, device=device)
    slots = torch.zeros(1, dtype=slots_dtype, device=device)
    listed = torch.zeros(1, dtype=torch.int32, device=device) if positions else None
    max_span = min(BLOCK, rows.shape[1])
    while True:
        pack_live_triton(rows, lane, spans, indptr, slots, listed, max_span=max_span)
        if max_span == rows.shape[1]:
            return
        max_span = min(2 * max_span, rows.shape[1])
