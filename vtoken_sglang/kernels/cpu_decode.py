"""One query token per lane against its live keys, on CPU, in plain PyTorch.

Per layer, over the tiles that `cpu_tiling` cut:

    scores   see `cpu_scores`; K is read where it lies (float32), once from memory
    weights  softmax within each tile, one call per batch of equal tiles
    parts    one `embedding_bag` over V for the whole batch: it reads V rows where they lie and
             sums them weighted, so V is never copied (a bag is one tile of one query head)
    merge    tiles of a lane joined by their log-sum-exp; absent when every lane is one tile

K and V are not repeated for grouped heads. Every score is a product of its own and bags are summed
in order: a lane's bits do not depend on its neighbours or on where its tokens lie.
"""

from __future__ import annotations

import torch

from vtoken_sglang.kernels.cpu_tiling import DecodeTiling, Merge, TileBatch

_SUM_MODE = 0


def run_decode(
    tiling: DecodeTiling,
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attend with one query token per lane.

    Args:
        tiling: the lanes, cut for this layer's geometry.
        q: in, [lanes, q_heads, dim].
        k_buffer: in, [num_slots, kv_heads, dim], contiguous.
        v_buffer: in, [num_slots, kv_heads, v_dim], contiguous; float32, bfloat16 or float16.
        scaling: factor on the scores.

    Returns:
        [lanes, q_heads, v_dim] in float32 or `v_buffer`'s dtype. Scores and softmax are float32.
    """
    tiling.scoring.fill(q, k_buffer, scaling)
    lse = []
    for batch in tiling.batches:
        torch.softmax(batch.scores, -1, out=batch.weights)
        if tiling.merge is not None:
            lse.append(_log_sum_exp(batch))
    parts = _weighted_sums(
        v_buffer.view(-1, v_buffer.shape[-1]), tiling.bags, tiling.bag_starts, tiling.weights
    )
    parts = parts.view(tiling.num_tiles, q.shape[1], -1)
    if tiling.merge is not None:
        return _join_tiles(tiling.merge, parts, torch.cat(lse))
    return parts if tiling.order is None else parts[tiling.order]


def _log_sum_exp(batch: TileBatch) -> torch.Tensor:
    """Per tile and query head [tiles, q_heads], from scores and their softmax.

    The largest score minus the log of the largest weight, since that weight is exp(0) over the
    sum: two cheap maxima instead of a second exponential.
    """
    return batch.scores.amax(-1) - batch.weights.amax(-1).log_()


def _weighted_sums(
    table: torch.Tensor, bags: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Per bag, the weighted sum of its rows of `table`, in order; in `table`'s dtype."""
    weights = weights.to(table.dtype)
    found = torch.embedding_bag(table, bags, starts, False, _SUM_MODE, False, weights)
    sums: torch.Tensor = found[0]
    return sums


def _join_tiles(merge: Merge, parts: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Join tiles into lanes, in float32.

    Args:
        merge: which tiles belong together.
        parts: normalised results per tile, [num_tiles, q_heads, v_dim].
        lse: log-sum-exp per tile, [num_tiles, q_heads].
    """
    peak = lse[merge.tiles_of_lane].amax(dim=1)
    share = (lse - peak[merge.lane_of_tile]).exp_().view(-1)
    table = parts.float().view(share.numel(), -1)
    sums = _weighted_sums(table, merge.bags, merge.bag_starts, share[merge.bags])
    total: torch.Tensor = torch.embedding_bag(share.view(-1, 1), merge.bags, merge.bag_starts)[0]
    return (sums / total).view(peak.shape[0], parts.shape[1], -1)
