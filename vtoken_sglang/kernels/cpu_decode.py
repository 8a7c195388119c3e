"""One query token per lane against its live keys, on CPU, in plain PyTorch.

Every lane's slot list is cut into tiles of `tile_width` keys (the last one shorter). Per layer:

    scores   one K gather and one small matrix product per tile; the gathered keys stay in L2
    weights  softmax within each tile, one call per tile width
    parts    one `embedding_bag` over V for the whole batch: it reads V rows where they lie and
             sums them weighted, so V is never copied (a bag is one tile of one query head)
    merge    tiles of a lane joined by their log-sum-exp; absent when every lane is one tile

The query heads of a K/V head are rows of one product, so K is not repeated. Cuts depend on a
lane's own length only, tiles are separate products and bags are summed in order: a lane's bits
do not depend on its neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vtoken_sglang.kernels.cpu_scratch import Scratch

TILE_BYTES = 512 * 1024
"""Float32 keys of one tile: a quarter of a 2 MiB L2 cache, so that V's rows fit beside them."""

_gather_rows = torch.ops.aten.index_select.out
_products = torch.ops.aten.bmm.out
_SUM_MODE = 0


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
class WidthGroup:
    """Tiles of equal width, adjacent in the scratch: softmax takes them in one call.

    Fields:
        tiles: their range in tile order.
        scores: in, shape [len(tiles), q_heads, width], float32.
        weights: out, same shape.
    """

    tiles: slice
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
        q: scaled queries, shape [lanes, kv_heads, group, dim], float32 scratch.
        tiles: in tile order: full tiles of all lanes, then shorter ones by width.
        groups: the same tiles by width.
        weights: all groups' weights, flat, float32 scratch.
        bags: row of V (slot * kv_heads + head) per weight, int32, or int64 if it overflows.
        bag_starts: first weight of each (tile, q_head), shape [num_tiles * q_heads].
        order: tile of each lane, int64, when every lane is one tile and tile order is not lane
            order; else None.
        merge: None when every lane is one tile.
    """

    q: torch.Tensor
    tiles: tuple[Tile, ...]
    groups: tuple[WidthGroup, ...]
    weights: torch.Tensor
    bags: torch.Tensor
    bag_starts: torch.Tensor
    order: torch.Tensor | None
    merge: Merge | None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A tile before it has memory: keys [start, start + width) of a lane."""

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
    full = geometry.tile_width
    cuts = [
        _Cut(lane, start, min(full, slots.numel() - start))
        for lane, slots in enumerate(lanes)
        for start in range(0, slots.numel(), full)
    ]
    cuts.sort(key=lambda cut: -cut.width)
    q_heads = geometry.kv_heads * geometry.group
    total = q_heads * sum(cut.width for cut in cuts)
    scores = scratch.take("scores", (total,), torch.float32)
    weights = scratch.take("weights", (total,), torch.float32)
    q = scratch.take(
        "q", (len(lanes), geometry.kv_heads, geometry.group, geometry.dim), torch.float32
    )
    index_dtype = torch.int32 if num_slots * geometry.kv_heads < 2**31 else torch.int64
    tiles: list[Tile] = []
    groups: list[WidthGroup] = []
    bags: list[torch.Tensor] = []
    offset = 0
    for width, same in itertools.groupby(cuts, key=lambda cut: cut.width):
        members = list(same)
        shape = (len(members), q_heads, width)
        size = len(members) * q_heads * width
        group = WidthGroup(
            tiles=slice(len(tiles), len(tiles) + len(members)),
            scores=scores[offset : offset + size].view(shape),
            weights=weights[offset : offset + size].view(shape),
        )
        groups.append(group)
        slots = torch.stack([lanes[cut.lane][cut.start : cut.start + width] for cut in members])
        tiles.extend(_place_tiles(members, slots, group, q, geometry, scratch))
        bags.append(_bag_rows(slots, geometry, index_dtype))
        offset += size
    return DecodeTiling(
        q=q,
        tiles=tuple(tiles),
        groups=tuple(groups),
        weights=weights,
        bags=torch.cat(bags),
        bag_starts=_bag_starts([cut.width for cut in cuts], q_heads, index_dtype),
        order=_tile_order(cuts, len(lanes)),
        merge=_plan_merge(cuts, len(lanes), q_heads),
    )


def _place_tiles(
    members: list[_Cut],
    slots: torch.Tensor,
    group: WidthGroup,
    q: torch.Tensor,
    geometry: Geometry,
    scratch: Scratch,
) -> list[Tile]:
    """Give tiles of one width their views; they share one key scratch, used in turn."""
    width, kv_heads, dim = members[0].width, geometry.kv_heads, geometry.dim
    keys = scratch.take("keys", (width, kv_heads * dim), torch.float32)
    staging = keys
    if geometry.k_dtype != torch.float32:
        staging = scratch.take("staging", (width, kv_heads * dim), geometry.k_dtype)
    keys_t = keys.view(width, kv_heads, dim).permute(1, 2, 0)
    scores = group.scores.view(len(members), kv_heads, geometry.group, width)
    return [
        Tile(
            slots=tile_slots,
            run=run,
            q=q[cut.lane],
            staging=staging,
            keys=keys,
            keys_t=keys_t,
            scores=tile_scores,
        )
        for cut, tile_slots, run, tile_scores in zip(
            members, slots.unbind(0), _runs(slots), scores.unbind(0), strict=True
        )
    ]


def _runs(slots: torch.Tensor) -> list[slice | None]:
    """The range of each tile of slots [tiles, width] whose slots are consecutive."""
    consecutive = (slots.diff(dim=1) == 1).all(dim=1).tolist()
    starts = slots[:, 0].tolist()
    width = slots.shape[1]
    return [
        slice(start, start + width) if is_run else None
        for start, is_run in zip(starts, consecutive, strict=True)
    ]


def _bag_rows(slots: torch.Tensor, geometry: Geometry, dtype: torch.dtype) -> torch.Tensor:
    """Rows of V viewed as [num_slots * kv_heads, v_dim] for tiles of slots [tiles, width]."""
    heads = torch.arange(geometry.kv_heads, dtype=dtype).view(-1, 1, 1)
    rows = slots.to(dtype)[:, None, None, :] * geometry.kv_heads + heads
    return rows.expand(-1, -1, geometry.group, -1).reshape(-1)


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
    tiling.q.copy_(q.view(tiling.q.shape)).mul_(scaling)
    _score_tiles(tiling.tiles, k_buffer)
    for group in tiling.groups:
        torch.softmax(group.scores, -1, out=group.weights)
    parts = _weighted_sums(
        v_buffer.view(-1, v_buffer.shape[-1]), tiling.bags, tiling.bag_starts, tiling.weights
    )
    parts = parts.view(len(tiling.tiles), q.shape[1], -1)
    if tiling.merge is not None:
        return _merge_tiles(tiling, tiling.merge, parts)
    return parts if tiling.order is None else parts[tiling.order]


def _score_tiles(tiles: tuple[Tile, ...], k_buffer: torch.Tensor) -> None:
    """Fill the tiles' scores. Calls per tile are kept to two: short contexts pay for each."""
    flat_keys = k_buffer.view(k_buffer.shape[0], -1)
    if k_buffer.dtype == torch.float32:
        for tile in tiles:
            if tile.run is not None:
                _products(tile.q, k_buffer[tile.run].permute(1, 2, 0), out=tile.scores)
            else:
                _gather_rows(flat_keys, 0, tile.slots, out=tile.keys)
                _products(tile.q, tile.keys_t, out=tile.scores)
        return
    for tile in tiles:
        if tile.run is not None:
            tile.keys.copy_(flat_keys[tile.run])
        else:
            _gather_rows(flat_keys, 0, tile.slots, out=tile.staging)
            tile.keys.copy_(tile.staging)
        _products(tile.q, tile.keys_t, out=tile.scores)


def _weighted_sums(
    table: torch.Tensor, bags: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Per bag, the weighted sum of its rows of `table`, in order; in `table`'s dtype."""
    weights = weights.to(table.dtype)
    sums: torch.Tensor = torch.embedding_bag(table, bags, starts, False, _SUM_MODE, False, weights)[
        0
    ]
    return sums


def _merge_tiles(tiling: DecodeTiling, merge: Merge, parts: torch.Tensor) -> torch.Tensor:
    """Join the tiles' normalised results [num_tiles, q_heads, v_dim] into lanes, in float32.

    A tile's log-sum-exp is its largest score minus the log of its largest weight, since that
    weight is exp(0) over the sum.
    """
    lse = torch.cat([g.scores.amax(-1) - g.weights.amax(-1).log() for g in tiling.groups])
    peak = lse[merge.tiles_of_lane].amax(dim=1)
    share = (lse - peak[merge.lane_of_tile]).exp().view(-1)
    table = parts.float().view(share.numel(), -1)
    sums = _weighted_sums(table, merge.bags, merge.bag_starts, share[merge.bags])
    total: torch.Tensor = torch.embedding_bag(share.view(-1, 1), merge.bags, merge.bag_starts)[0]
    return (sums / total).view(peak.shape[0], parts.shape[1], -1)
