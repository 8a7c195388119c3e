"""`attention_mass`: how much attention each live token receives, added to its score.

Attention gives, per query token and head, the logarithm of its softmax denominator (lse). With it
the weight of one key needs only that key: `exp(scale * q.k - lse)`. So one more read of the keys
tells what each token is worth (H2O arXiv 2306.14048, Scissorhands 2305.17118, TOVA 2401.06104,
SnapKV 2404.14469). Scores live by (row, position): moving a token moves no score. As a loop:

    for lane b, for query token t of the lane (the last ones of its list), for head h:
        for entry i of the lane's list that t sees, when row_ids[b] != 0 and positions[i] >= 0:
            weight = exp(scale * dot(q[t, h], k_buffer[slots[i], h // group]) - lse[t, h])
            if below_uniform and below_uniform[b]:
                weight = 1 if weight < 1 / (number of entries that t sees) else 0
            scores[row_ids[b], positions[i]] += weight

Query token j of m sees the first `len - m + j + 1` entries. For decode m = 1: all of them.
"""

from __future__ import annotations

import torch

from vtoken_sglang.kernels.attention_mass.reference import attention_mass_reference


def attention_mass(
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
    """Add every live token's attention weight, summed over query tokens and heads, to `scores`.

    May be captured in a CUDA graph: shapes are static, lengths are read on the device, and lanes
    of row 0 (padding) and sink entries (position -1) add nothing.

    Args:
        q: in, [num_queries, q_heads, dim], fp16, bf16 or f32; dim has unit stride.
        k_buffer: in, [num_slots, kv_heads, dim], any floating dtype incl. fp8, contiguous.
        qo_indptr: in, int32 [bs + 1], where each lane's query tokens begin.
        indptr: in, int32 [bs + 1], where each lane's list begins.
        slots: in, int32 or int64 [>= indptr[-1]], slot of each entry.
        positions: in, int32 [>= indptr[-1]], position of each entry, -1 = the sink.
        row_ids: in, integer [>= bs], row of `scores` for each lane, 0 = none; a row only once.
        lse: in, float32 [num_queries, q_heads], natural logarithm (FlashInfer's is base 2:
            multiply it by ln 2).
        scores: in/out, float32 [num_rows, width], unit stride in a row.
        scale: factor on q.k, the layer's, times the scale of a quantised key.
        below_uniform: in, int32 [>= bs], 1 for lanes that count the weights below an equal share
            instead of adding weights (Scissorhands); None for no such lane.
    """
    if q.is_cuda:
        from vtoken_sglang.kernels.attention_mass.triton import attention_mass_triton

        kernel = attention_mass_triton
    else:
        kernel = attention_mass_reference
    lists = (qo_indptr, indptr, slots, positions, row_ids)
    kernel(q, k_buffer, *lists, lse, scores, scale=scale, below_uniform=below_uniform)
