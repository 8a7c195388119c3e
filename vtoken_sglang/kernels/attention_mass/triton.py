"""Triton kernel of `attention_mass`.

    grid = (lanes) x (splits), both fixed, so that a captured graph serves every length
    program: every `splits`-th block of the lane's list; keys of a block are read once per
             key head and used by all its query heads and query tokens

A (row, position) belongs to one program: plain loads and stores, no atomics, the same sum on every
run.
"""

# Arguments of a kernel are tensors to Triton, not to mypy.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

SPLITS = 32
TILE_ELEMENTS = 4096


@triton.jit
def attention_mass_kernel(
    q,  # in: [num_queries, q_heads, dim]
    k_buffer,  # in: [num_slots, kv_heads, dim], contiguous
    qo_indptr,  # in: int32 [bs + 1]
    indptr,  # in: int32 [bs + 1]
    slots,  # in: int32 or int64
    positions,  # in: int32, -1 = sink
    row_ids,  # in: integer [bs], row of `scores`, 0 = padding or not watched
    below_uniform,  # in: int32 [bs], 1 = count weights below an equal share
    lse,  # in: float32 [num_queries, q_heads], contiguous
    scores,  # in/out: float32 [num_rows, row_stride]
    scale,
    q_token_stride,
    q_head_stride,
    scores_row_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BELOW_UNIFORM: tl.constexpr,
):
    lane = tl.program_id(0)
    row = tl.load(row_ids + lane).to(tl.int64)
    if row == 0:
        return
    begin = tl.load(indptr + lane)
    length = tl.load(indptr + lane + 1) - begin
    first = tl.load(qo_indptr + lane)
    num_queries = tl.load(qo_indptr + lane + 1) - first
    if num_queries == 0:
        return
    counts = False
    if HAS_BELOW_UNIFORM:
        counts = tl.load(below_uniform + lane) != 0
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < DIM
    for start in range(tl.program_id(1) * BLOCK, length, tl.num_programs(1) * BLOCK):
        entry = start + tl.arange(0, BLOCK)
        slot = tl.load(slots + begin + entry, mask=entry < length, other=0).to(tl.int64)
        pos = tl.load(positions + begin + entry, mask=entry < length, other=-1)
        counted = pos >= 0
        mass = tl.zeros([BLOCK], dtype=tl.float32)
        for kv_head in range(KV_HEADS):
            offset = (slot * KV_HEADS + kv_head)[:, None] * DIM + dim[None, :]
            mask = counted[:, None] & in_dim[None, :]
            keys = tl.load(k_buffer + offset, mask=mask, other=0.0).to(tl.float32)
            for query in range(num_queries):
                token = (first + query).to(tl.int64)
                seen = counted & (entry <= length - num_queries + query)
                for member in range(GROUP):
                    head = kv_head * GROUP + member
                    at = q + token * q_token_stride + head * q_head_stride + dim
                    vector = tl.load(at, mask=in_dim, other=0.0).to(tl.float32)
                    logit = tl.sum(keys * vector[None, :], axis=1) * scale
                    denominator = tl.load(lse + token * (KV_HEADS * GROUP) + head)
                    weight = tl.exp(logit - denominator)
                    if HAS_BELOW_UNIFORM:
                        share = 1.0 / (length - num_queries + query + 1)
                        weight = tl.where(counts, (weight < share).to(tl.float32), weight)
                    mass += tl.where(seen, weight, 0.0)
        target = scores + row * scores_row_stride + pos
        tl.store(target, tl.load(target, mask=counted, other=0.0) + mass, mask=counted)


def constants(kv_heads: int, group: int, dim: int) -> dict[str, int]:
    """Values of the kernel's constexpr arguments; `group` query heads share a key head."""
    block_dim = triton.next_power_of_2(dim)
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "DIM": dim,
        "BLOCK_DIM": block_dim,
        "BLOCK": max(16, TILE_ELEMENTS // block_dim),
    }


def num_warps(key_bytes: int) -> int:
    """Warps of a program for keys of `key_bytes` each; 4 would spill on sm_90 with 1-byte keys."""
    return 8 if key_bytes == 1 else 4


def attention_mass_triton(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    indptr: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    row_ids: torch.Tensor,
    lse: torch.Tensor,
    scores: torch.Tensor,
    *,
    scale: float,
    below_uniform: torch.Tensor | None = None,
) -> None:
    """See `attention_mass`."""
    bs = indptr.numel() - 1
    if not bs:
        return
    kv_heads, dim = k_buffer.shape[1:]
    attention_mass_kernel[(bs, SPLITS)](
        q,
        k_buffer,
        qo_indptr,
        indptr,
        slots,
        positions,
        row_ids,
        row_ids if below_uniform is None else below_uniform,
        lse.contiguous(),
        scores,
        scale,
        q.stride(0),
        q.stride(1),
        scores.stride(0),
        num_warps=num_warps(k_buffer.element_size()),
        HAS_BELOW_UNIFORM=below_uniform is not None,
        **constants(kv_heads, q.shape[1] // kv_heads, dim),
    )
