"""Joining the tiles of a lane: each holds a softmax of its own keys, and its log-sum-exp.

Sums go over lists of table rows ("bags"), in the order of the list.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SUM_MODE = 0


def bag_starts(widths: list[int], q_heads: int) -> torch.Tensor:
    """Where each bag begins when every one of `widths` is the length of `q_heads` bags, int64."""
    lengths = torch.tensor(widths).repeat_interleave(q_heads)
    return lengths.cumsum(0) - lengths


def weighted_sums(
    table: torch.Tensor, bags: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Per bag, the weighted sum of its rows of `table`, in order; in `table`'s dtype."""
    weights = weights.to(table.dtype)
    found = torch.embedding_bag(table, bags, starts, False, _SUM_MODE, False, weights)
    sums: torch.Tensor = found[0]
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """How tiles join into lanes; needed when a lane has several.

    Fields:
        lane_of_tile: shape [num_tiles], int64.
        tiles_of_lane: shape [lanes, tiles of the longest], int64; others repeat their first tile.
        bags: rows of [num_tiles * q_heads] per (lane, q_head), lane by lane, int64.
        bag_starts: first entry of each bag, shape [lanes * q_heads], int64.
    """

    lane_of_tile: torch.Tensor
    tiles_of_lane: torch.Tensor
    bags: torch.Tensor
    bag_starts: torch.Tensor


def plan_merge(lane_of_tile: list[int], num_lanes: int, q_heads: int) -> Merge | None:
    """How to join tiles of these lanes; None when every lane is one tile."""
    if len(lane_of_tile) == num_lanes:
        return None
    tiles: list[list[int]] = [[] for _ in range(num_lanes)]
    for index, lane in enumerate(lane_of_tile):
        tiles[lane].append(index)
    max_tiles = max(len(own) for own in tiles)
    heads = torch.arange(q_heads).unsqueeze(1)
    return Merge(
        lane_of_tile=torch.tensor(lane_of_tile),
        tiles_of_lane=torch.tensor([own + own[:1] * (max_tiles - len(own)) for own in tiles]),
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
