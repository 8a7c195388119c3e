"""Joining the tiles of a lane: each holds a softmax of its own keys, and its log-sum-exp."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtoken_sglang.kernels.cpu_bags import bag_starts, weighted_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """How tiles join into lanes; needed when a lane has several.

    Fields:
        lane_of_tile: shape [num_tiles], int64.
        tiles_of_lane: shape [lanes, most tiles], int64; short lanes repeat their first tile.
        bags: rows of [num_tiles * q_heads] per (lane, q_head), lane by lane, int64.
        bag_starts: first entry of each bag, shape [lanes * q_heads], int64.
    """

    lane_of_tile: torch.Tensor
    tiles_of_lane: torch.Tensor
    bags: torch.Tensor
    bag_starts: torch.Tensor


def plan_merge(lane_of_tile: list[int], num_lanes: int, q_heads: int) -> Merge | None:
    if len(lane_of_tile) == num_lanes:
        return None
    tiles: list[list[int]] = [[] for _ in range(num_lanes)]
    for index, lane in enumerate(lane_of_tile):
        tiles[lane].append(index)
    most = max(len(own) for own in tiles)
    heads = torch.arange(q_heads).unsqueeze(1)
    return Merge(
        lane_of_tile=torch.tensor(lane_of_tile),
        tiles_of_lane=torch.tensor([own + own[:1] * (most - len(own)) for own in tiles]),
        bags=torch.cat([(torch.tensor(own) * q_heads + heads).flatten() for own in tiles]),
        bag_starts=bag_starts([len(own) for own in tiles], q_heads),
    )


def join_tiles(merge: Merge, parts: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Join tiles into lanes, in float32.

    Args:
        merge: which tiles belong together.
        parts: normalised results per tile, [num_tiles, q_heads, v_dim].
        lse: log-sum-exp per tile, [num_tiles, q_heads].
    """
    peak = lse[merge.tiles_of_lane].amax(dim=1)
    share = (lse - peak[merge.lane_of_tile]).exp_().view(-1)
    table = parts.float().view(share.numel(), -1)
    sums = weighted_sums(table, merge.bags, merge.bag_starts, share[merge.bags])
    total: torch.Tensor = torch.embedding_bag(share.view(-1, 1), merge.bags, merge.bag_starts)[0]
    return (sums / total).view(peak.shape[0], parts.shape[1], -1)
