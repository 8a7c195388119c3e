"""One query token per lane against its live keys, on CPU, in plain PyTorch.

Per layer, over the tiles that `tiling` cut:

    scores   see `scores`; K is read where it lies (float32), once from memory
    weights  softmax within each tile, one call per batch of equal tiles
    parts    one `embedding_bag` over V for the whole batch: it reads V rows where they lie and
             sums them weighted, so V is never copied (a bag is one tile of one query head)
    merge    tiles of a lane joined by their log-sum-exp; absent when every lane is one tile

K and V are not repeated for grouped heads. Every score is a product of its own and bags are summed
in order: a lane's bits do not depend on its neighbours or on where its tokens lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vtoken_sglang.kernels.cpu.merge import join_tiles, weighted_sums
from vtoken_sglang.kernels.cpu.tiling import DecodeTiling, TileBatch


@dataclass(frozen=True, slots=True)
class LaneWeights:
    """Softmax weights of one layer's decode. Valid until the next layer's.

    Fields:
        tiling: the lanes.
        lse: log-sum-exp per tile, [num_tiles, q_heads]; None when every lane is one tile.
    """

    tiling: DecodeTiling
    lse: torch.Tensor | None

    def of(self, lane: int) -> torch.Tensor:
        """Weights of a lane's query over its keys, float32 [q_heads, keys]; may be a view."""
        tiles = [(at, tile) for at, tile in enumerate(self.tiling.tiles) if tile.lane == lane]
        heads = self.tiling.batches[0].weights.shape[1]
        parts = [
            self.tiling.weights[tile.offset : tile.offset + heads * tile.width].view(heads, -1)
            for _, tile in tiles
        ]
        if self.lse is None or len(tiles) == 1:
            return parts[0]
        shares = self.lse[[at for at, _ in tiles]].softmax(dim=0)
        scaled = [part * share[:, None] for part, share in zip(parts, shares, strict=True)]
        return torch.cat(scaled, dim=1)


SeeWeights = Callable[[LaneWeights], None]


def run_decode(
    tiling: DecodeTiling,
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    scaling: float,
    seen: SeeWeights | None = None,
) -> torch.Tensor:
    """Attend with one query token per lane.

    Args:
        tiling: the lanes, cut for this layer's geometry.
        q: in, [lanes, q_heads, dim].
        k_buffer: in, [num_slots, kv_heads, dim], contiguous.
        v_buffer: in, [num_slots, kv_heads, v_dim], contiguous; float32, bfloat16 or float16.
        scaling: factor on the scores.
        seen: called with the weights before they are used up.

    Returns:
        [lanes, q_heads, v_dim] in float32 or `v_buffer`'s dtype. Scores and softmax are float32.
    """
    tiling.scoring.fill(q, k_buffer, scaling)
    lse = []
    for batch in tiling.batches:
        torch.softmax(batch.scores, -1, out=batch.weights)
        if tiling.merge is not None:
            lse.append(_log_sum_exp(batch))
    joined = torch.cat(lse) if tiling.merge is not None else None
    if seen is not None:
        seen(LaneWeights(tiling, joined))
    parts = weighted_sums(
        v_buffer.view(-1, v_buffer.shape[-1]), tiling.bags, tiling.bag_starts, tiling.weights
    )
    parts = parts.view(tiling.num_tiles, q.shape[1], -1)
    if tiling.merge is not None and joined is not None:
        return join_tiles(tiling.merge, parts, joined)
    return parts if tiling.order is None else parts[tiling.order]


def _log_sum_exp(batch: TileBatch) -> torch.Tensor:
    """Per tile and query head [tiles, q_heads], from scores and their softmax.

    The largest score minus the log of the largest weight, since that weight is exp(0) over the
    sum: two cheap maxima instead of a second exponential.
    """
    return batch.scores.amax(-1) - batch.weights.amax(-1).log_()
