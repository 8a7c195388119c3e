"""How a decode batch is cut into tiles, and the scratch that one layer's work on them uses.

A lane's slot list is cut into tiles of `Geometry.tile_width` keys, the last one shorter. Tiles are
ordered by width, so that equal ones lie side by side in the scratch and share calls. Cuts depend
on a lane's own length only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vtoken_sglang.kernels.cpu_scratch import Scratch

TILE_BYTES = 512 * 1024
"""Float32 keys of one tile: a quarter of a 2 MiB L2 cache, so that its scores fit beside them."""

BATCH_TILES = 16
"""Tiles scored before their softmax: their scores are still in L2 then."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Up to `tile_width` consecutive keys of one lane, with the scratch views they use.

    Fields:
        slots: the keys' slots, shape [width], int64.
        run: the slots as a range when they are consecutive (then keys are read in place, to the
            same bits), else None.
        q: the lane's scaled query, shape [kv_heads, group, dim], float32.
        staging: gathered keys, shape [width, kv_heads * dim], key buffer's dtype.
        keys: the same keys in float32 (the same memory where that is their dtype already).
        keys_t: `keys` as [kv_heads, dim, width].
        scores: out, shape [kv_heads, group, width], float32.
    """

    slots: torch.Tensor
    run: slice | None
    q: torch.Tensor
    staging: torch.Tensor
    keys: torch.Tensor
    keys_t: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TileBatch:
    """Tiles of equal width, adjacent in the scratch, at most `BATCH_TILES`.

    Fields:
        tiles: in tile order.
        scores: the tiles' scores, shape [len(tiles), q_heads, width], float32 scratch.
        weights: softmax of them, same shape.
    """

    tiles: tuple[Tile, ...]
    scores: torch.Tensor
    weights: torch.Tensor


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTiling:
    """One forward's decode lanes, cut for one geometry; shared by all layers that have it.

    Fields:
        num_tiles: tiles of all batches.
        q: scaled queries, shape [lanes, kv_heads, group, dim], float32 scratch.
        batches: all tiles, in tile order.
        weights: all batches' weights, flat, float32 scratch.
        bags: row of V (slot * kv_heads + head) per weight, int32, or int64 if it overflows.
        bag_starts: first weight of each (tile, q_head), shape [num_tiles * q_heads].
        order: tile of each lane, int64, when every lane is one tile and tile order is not lane
            order; else None.
        merge: None when every lane is one tile.
    """

    num_tiles: int
    q: torch.Tensor
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
    index_dtype = torch.int32 if num_slots * geometry.kv_heads < 2**31 else torch.int64
    rows = slots.to(index_dtype) * geometry.kv_heads
    heads = torch.arange(geometry.kv_heads, dtype=index_dtype).view(-1, 1, 1)
    bags = []
    for width, same in itertools.groupby(cuts, key=lambda cut: cut.width):
        members = torch.stack([rows[cut.start : cut.start + width] for cut in same])
        of_heads = members[:, None, None, :] + heads
        bags.append(of_heads.expand(-1, -1, geometry.group, -1).reshape(-1))
    total = geometry.q_heads * slots.numel()
    weights = scratch.take("weights", (total,), torch.float32)
    q_shape = (len(lanes), geometry.kv_heads, geometry.group, geometry.dim)
    q = scratch.take("q", q_shape, torch.float32)
    return DecodeTiling(
        num_tiles=len(cuts),
        q=q,
        batches=_place(cuts, slots, q, weights, geometry, scratch),
        weights=weights,
        bags=torch.cat(bags),
        bag_starts=_bag_starts([cut.width for cut in cuts], geometry.q_heads, index_dtype),
        order=_tile_order(cuts, len(lanes)),
        merge=_plan_merge(cuts, len(lanes), geometry.q_heads),
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


def _place(
    cuts: list[_Cut],
    slots: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    geometry: Geometry,
    scratch: Scratch,
) -> tuple[TileBatch, ...]:
    """Give the tiles their views; all tiles use the same key scratch, in turn."""
    kv_heads, group = geometry.kv_heads, geometry.group
    scores = scratch.take("scores", (weights.numel(),), torch.float32)
    most = cuts[0].width
    all_keys = scratch.take("keys", (most, kv_heads * geometry.dim), torch.float32)
    all_staging = all_keys
    if geometry.k_dtype != torch.float32:
        all_staging = scratch.take("staging", tuple(all_keys.shape), geometry.k_dtype)
    runs = iter(_runs(cuts, slots))
    queries = q.unbind(0)
    batches = []
    offset = 0
    for members in _batches(cuts):
        width = members[0].width
        keys, staging = all_keys[:width], all_staging[:width]
        keys_t = keys.view(width, kv_heads, geometry.dim).permute(1, 2, 0)
        size = len(members) * geometry.q_heads * width
        batch_scores = scores[offset : offset + size]
        tile_scores = batch_scores.view(len(members), kv_heads, group, width).unbind(0)
        tiles = tuple(
            Tile(
                slots=slots[cut.start : cut.start + width],
                run=next(runs),
                q=queries[cut.lane],
                staging=staging,
                keys=keys,
                keys_t=keys_t,
                scores=own_scores,
            )
            for cut, own_scores in zip(members, tile_scores, strict=True)
        )
        shape = (len(members), geometry.q_heads, width)
        batches.append(
            TileBatch(
                tiles=tiles,
                scores=batch_scores.view(shape),
                weights=weights[offset : offset + size].view(shape),
            )
        )
        offset += size
    return tuple(batches)


def _batches(cuts: list[_Cut]) -> list[list[_Cut]]:
    """Neighbours of equal width, at most `BATCH_TILES` together."""
    batches = []
    for _, same in itertools.groupby(cuts, key=lambda cut: cut.width):
        members = list(same)
        batches += [
            members[start : start + BATCH_TILES] for start in range(0, len(members), BATCH_TILES)
        ]
    return batches


def _runs(cuts: list[_Cut], slots: torch.Tensor) -> list[slice | None]:
    """The range of each tile whose slots are consecutive: no break lies inside it."""
    breaks = torch.zeros_like(slots)
    torch.cumsum(slots.diff() != 1, dim=0, out=breaks[1:])
    starts = torch.tensor([cut.start for cut in cuts])
    widths = torch.tensor([cut.width for cut in cuts])
    is_run = breaks[starts] == breaks[starts + widths - 1]
    return [
        slice(first, first + cut.width) if consecutive else None
        for cut, first, consecutive in zip(
            cuts, slots[starts].tolist(), is_run.tolist(), strict=True
        )
    ]


def _bag_starts(widths: list[int], q_heads: int, dtype: torch.dtype) -> torch.Tensor:
    lengths = torch.tensor(widths, dtype=dtype).repeat_interleave(q_heads)
    return lengths.cumsum(0, dtype=dtype) - lengths


def _tile_order(cuts: list[_Cut], num_lanes: int) -> torch.Tensor | None:
    lanes = [cut.lane for cut in cuts]
    if len(cuts) != num_lanes or lanes == sorted(lanes):
        return None
    return torch.tensor(lanes).argsort()


def _plan_merge(cuts: list[_Cut], num_lanes: int, q_heads: int) -> Merge | None:
    if len(cuts) == num_lanes:
        return None
    tiles: list[list[int]] = [[] for _ in range(num_lanes)]
    for index, cut in enumerate(cuts):
        tiles[cut.lane].append(index)
    most = max(len(own) for own in tiles)
    heads = torch.arange(q_heads).unsqueeze(1)
    return Merge(
        lane_of_tile=torch.tensor([cut.lane for cut in cuts]),
        tiles_of_lane=torch.tensor([own + own[:1] * (most - len(own)) for own in tiles]),
        bags=torch.cat([(torch.tensor(own) * q_heads + heads).flatten() for own in tiles]),
        bag_starts=_bag_starts([len(own) for own in tiles], q_heads, torch.int64),
    )
