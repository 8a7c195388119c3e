"""How a decode batch is cut into tiles, and the scratch that one layer's work on them uses.

A lane's slot list is cut into tiles of `Geometry.tile_width` keys, the last one shorter. Tiles are
ordered by width, so that equal ones lie side by side in the scratch and share calls. Cuts depend
on a lane's own length only. Per tile, scores lie as [kv_heads, group, width].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vtoken_sglang.kernels.cpu.merge import Merge, bag_starts, plan_merge
from vtoken_sglang.kernels.cpu.scores import (
    GatheredScores,
    SampledScores,
    gathered_scores,
    sampled_scores,
)
from vtoken_sglang.kernels.cpu.scratch import Scratch

TILE_BYTES = 512 * 1024
"""Float32 keys of one tile: a quarter of a 2 MiB L2 cache. The query heads of a group read a
tile's K and V one after the other, all but the first from cache."""

BATCH_TILES = 16
"""Tiles per softmax call: what follows finds their scores in L2."""

MAX_SAMPLED_GROUP = 8
"""Query heads per K/V head up to which reading K once per query head from cache is no slower than
copying it for a matrix product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Head layout of a layer.

    Fields:
        kv_heads: K/V heads.
        group: query heads per K/V head.
        dim: width of a query or key head.
        k_dtype: dtype of the key buffer.
    """

    kv_heads: int
    group: int
    dim: int
    k_dtype: torch.dtype

    @property
    def q_heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.group

    @property
    def tile_width(self) -> int:
        """Keys per full tile: the power of two that fills `TILE_BYTES`, 64 to 2048."""
        fitting = TILE_BYTES // (4 * self.kv_heads * self.dim)
        return max(64, min(2048, 1 << max(fitting, 1).bit_length() - 1))

    @property
    def is_sampled(self) -> bool:
        """Whether scores are taken by `SampledScores`."""
        return self.k_dtype == torch.float32 and self.group <= MAX_SAMPLED_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class TileBatch:
    """Tiles of equal width, adjacent in tile order, at most `BATCH_TILES`.

    Fields:
        scores: in, shape [tiles, q_heads, width], float32 scratch.
        weights: out, softmax of the scores, same shape.
    """

    scores: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class TileRange:
    """One tile among its lane's keys and in the flat weights.

    Fields:
        lane: index of the lane. start: first key, counted within the lane. width: keys.
        offset: first weight; [q_heads, width] follow.
    """

    lane: int
    start: int
    width: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiling:
    """One forward's decode lanes, cut for one geometry; shared by all layers that have it.

    Fields:
        num_tiles: tiles of all batches.
        tiles: where each tile's weights and keys are, in tile order.
        scoring: fills the batches' scores.
        batches: all tiles, in tile order.
        weights: all batches' weights, flat, float32 scratch.
        bags: row of V (slot * kv_heads + head) per weight, int32, or int64 if it overflows.
        bag_starts: first weight of each (tile, q_head), shape [num_tiles * q_heads], as `bags`.
        order: tile of each lane, int64, when every lane is one tile and tile order is not lane
            order; else None.
        merge: None when every lane is one tile.
    """

    num_tiles: int
    tiles: tuple[TileRange, ...]
    scoring: SampledScores | GatheredScores
    batches: tuple[TileBatch, ...]
    weights: torch.Tensor
    bags: torch.Tensor
    bag_starts: torch.Tensor
    order: torch.Tensor | None
    merge: Merge | None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A tile before it has memory: its lane, and where it lies in all lanes' slots together."""

    lane: int
    start: int
    width: int


def cut_tiles(
    lanes: Sequence[torch.Tensor], geometry: Geometry, num_slots: int, scratch: Scratch
) -> DecodeTiling:
    """Cut the lanes' slot lists into tiles and lay out the scratch of one layer.

    Args:
        lanes: slots per lane, each int64 [at least 1], CPU.
        geometry: head layout of the layers that will use the tiling.
        num_slots: slots of the K/V buffers.
        scratch: work buffers; the tiling keeps views into it.
    """
    cuts = _cut([lane.numel() for lane in lanes], geometry.tile_width)
    slots = torch.cat(list(lanes))
    total = geometry.q_heads * slots.numel()
    scores = scratch.take("scores", (total,), torch.float32)
    weights = scratch.take("weights", (total,), torch.float32)
    rows = _rows_per_score(cuts, slots, geometry, scratch)
    starts = bag_starts([cut.width for cut in cuts], geometry.q_heads)
    lane_of_tile = [cut.lane for cut in cuts]
    scoring: SampledScores | GatheredScores
    if geometry.is_sampled:
        in_order = lane_of_tile == list(range(len(lanes)))
        scoring = sampled_scores(
            scores,
            starts,
            rows,
            num_slots * geometry.kv_heads,
            None if in_order else torch.tensor(lane_of_tile),
        )
    else:
        scoring = gathered_scores(
            [slots[cut.start : cut.start + cut.width] for cut in cuts],
            lane_of_tile,
            scores,
            (len(lanes), geometry.kv_heads, geometry.group, geometry.dim),
            geometry.k_dtype,
            scratch,
        )
    bag_dtype = torch.int32 if num_slots * geometry.kv_heads < 2**31 else torch.int64
    return DecodeTiling(
        num_tiles=len(cuts),
        tiles=_ranges(cuts, [lane.numel() for lane in lanes], geometry.q_heads),
        scoring=scoring,
        batches=_batches(cuts, scores, weights, geometry.q_heads),
        weights=weights,
        bags=scratch.take(f"bags {geometry}", (total,), bag_dtype).copy_(rows),
        bag_starts=starts.to(bag_dtype),
        order=_tile_order(lane_of_tile, len(lanes)),
        merge=plan_merge(lane_of_tile, len(lanes), geometry.q_heads),
    )


def _cut(lens: list[int], full: int) -> list[_Cut]:
    """Tiles of all lanes, widest first; a lane's tiles stay in order."""
    cuts = []
    first = 0
    for lane, length in enumerate(lens):
        cuts += [
            _Cut(lane, first + start, min(full, length - start)) for start in range(0, length, full)
        ]
        first += length
    cuts.sort(key=lambda cut: -cut.width)
    return cuts


def _ranges(cuts: list[_Cut], lens: list[int], q_heads: int) -> tuple[TileRange, ...]:
    firsts = list(itertools.accumulate(lens, initial=0))
    found, offset = [], 0
    for cut in cuts:
        found.append(TileRange(cut.lane, cut.start - firsts[cut.lane], cut.width, offset))
        offset += q_heads * cut.width
    return tuple(found)


def _rows_per_score(
    cuts: list[_Cut], slots: torch.Tensor, geometry: Geometry, scratch: Scratch
) -> torch.Tensor:
    """Row slot * kv_heads + head of K and V, per score in tile order, int64 [total].

    Scratch of this geometry alone: unlike scores it must last for all layers of the forward.
    """
    rows = scratch.take(f"rows {geometry}", (geometry.q_heads * slots.numel(),), torch.int64)
    first_rows = slots * geometry.kv_heads
    heads = torch.arange(geometry.kv_heads).view(-1, 1, 1)
    offset = 0
    for width, same in itertools.groupby(cuts, key=lambda cut: cut.width):
        members = torch.stack([first_rows[cut.start : cut.start + width] for cut in same])
        shape = (members.shape[0], geometry.kv_heads, geometry.group, width)
        end = offset + members.shape[0] * geometry.q_heads * width
        rows[offset:end].view(shape).copy_(members[:, None, None, :] + heads)
        offset = end
    return rows


def _batches(
    cuts: list[_Cut], scores: torch.Tensor, weights: torch.Tensor, q_heads: int
) -> tuple[TileBatch, ...]:
    """Neighbours of equal width, at most `BATCH_TILES` together."""
    batches = []
    offset = 0
    for width, same in itertools.groupby(cut.width for cut in cuts):
        count = len(list(same))
        for start in range(0, count, BATCH_TILES):
            shape = (min(BATCH_TILES, count - start), q_heads, width)
            end = offset + shape[0] * q_heads * width
            batches.append(
                TileBatch(
                    scores=scores[offset:end].view(shape), weights=weights[offset:end].view(shape)
                )
            )
            offset = end
    return tuple(batches)


def _tile_order(lane_of_tile: list[int], num_lanes: int) -> torch.Tensor | None:
    if len(lane_of_tile) != num_lanes or lane_of_tile == sorted(lane_of_tile):
        return None
    return torch.tensor(lane_of_tile).argsort()
