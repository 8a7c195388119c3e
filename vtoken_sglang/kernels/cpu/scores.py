"""Scores of a tiled decode batch on CPU: q times K for every key of every tile, two ways.

`SampledScores` is one call per layer that reads K where it lies: the scores are the values of a
sparse matrix whose rows are (tile, query head) and whose columns are K rows, and PyTorch's sampled
product fills just those. Float32 only. `GatheredScores` copies a tile's keys to scratch in float32
and multiplies them, tile by tile: for other dtypes, and for groups so large that the product's
reuse of K in registers pays for the copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vtoken_sglang.kernels.cpu.scratch import Scratch

_gather_rows = torch.ops.aten.index_select.out
_products = torch.ops.aten.bmm.out


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledScores:
    """Scores as the values of a sparse matrix.

    Fields:
        matrix: CSR, [num_tiles * q_heads, num_slots * kv_heads], int64 indices, float32 values;
            the values are the tiling's flat scores. They start finite: the product adds zero
            times the old value.
        lane_of_tile: lane whose query a tile uses, shape [num_tiles], int64; None when tiles are
            the lanes, in order.
    """

    matrix: torch.Tensor
    lane_of_tile: torch.Tensor | None

    def fill(self, q: torch.Tensor, k_buffer: torch.Tensor, scaling: float) -> None:
        """Write all scores. `q` is [lanes, q_heads, dim], `k_buffer` [num_slots, kv_heads, dim]."""
        dim = q.shape[-1]
        queries = q.float() if self.lane_of_tile is None else q.float()[self.lane_of_tile]
        torch.sparse.sampled_addmm(
            self.matrix,
            queries.view(-1, dim),
            k_buffer.view(-1, dim).t(),
            beta=0.0,
            alpha=scaling,
            out=self.matrix,
        )


def sampled_scores(
    scores: torch.Tensor,
    starts: torch.Tensor,
    columns: torch.Tensor,
    num_columns: int,
    lane_of_tile: torch.Tensor | None,
) -> SampledScores:
    """Lay the sparse matrix over the flat `scores` (which are zeroed).

    Args:
        scores: the values, shape [total], float32.
        starts: first score of each (tile, query head), shape [num_tiles * q_heads], int64.
        columns: K row (slot * kv_heads + head) of each score, shape [total], int64.
        num_columns: K rows, num_slots * kv_heads.
        lane_of_tile: see `SampledScores`.
    """
    ends = torch.cat([starts, torch.tensor([scores.numel()])])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        matrix = torch.sparse_csr_tensor(
            ends, columns, scores.zero_(), (starts.numel(), num_columns), check_invariants=False
        )
    return SampledScores(matrix=matrix, lane_of_tile=lane_of_tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTile:
    """One tile's keys, with the scratch views that its product uses.

    Fields:
        slots: the keys' slots, shape [width], int64.
        run: the slots as a range when they are consecutive (then they are read in place, to the
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
class GatheredScores:
    """Scores by one gather and one product per tile.

    Fields:
        q: scaled queries, shape [lanes, kv_heads, group, dim], float32 scratch.
        tiles: in tile order; all use the same key scratch, in turn.
    """

    q: torch.Tensor
    tiles: tuple[KeyTile, ...]

    def fill(self, q: torch.Tensor, k_buffer: torch.Tensor, scaling: float) -> None:
        """Write all scores. `q` is [lanes, q_heads, dim], `k_buffer` [num_slots, kv_heads, dim]."""
        self.q.copy_(q.view(self.q.shape)).mul_(scaling)
        flat_keys = k_buffer.view(k_buffer.shape[0], -1)
        is_float32 = k_buffer.dtype == torch.float32
        for tile in self.tiles:
            keys_t = tile.keys_t
            if tile.run is None:
                _gather_rows(flat_keys, 0, tile.slots, out=tile.staging)
                if not is_float32:
                    tile.keys.copy_(tile.staging)
            elif is_float32:
                keys_t = k_buffer[tile.run].permute(1, 2, 0)
            else:
                tile.keys.copy_(flat_keys[tile.run])
            _products(tile.q, keys_t, out=tile.scores)


def gathered_scores(
    tile_slots: Sequence[torch.Tensor],
    lane_of_tile: Sequence[int],
    scores: torch.Tensor,
    q_shape: tuple[int, int, int, int],
    k_dtype: torch.dtype,
    scratch: Scratch,
) -> GatheredScores:
    """Lay the tiles over the flat `scores`.

    Args:
        tile_slots: slots per tile, each int64.
        lane_of_tile: lane whose query a tile uses.
        scores: all tiles' scores, flat, float32.
        q_shape: lanes, kv_heads, group, dim.
        k_dtype: dtype of the key buffer.
        scratch: work buffers; the result keeps views into it.
    """
    _, kv_heads, group, dim = q_shape
    q = scratch.take("q", q_shape, torch.float32)
    max_width = max(slots.numel() for slots in tile_slots)
    keys = scratch.take("keys", (max_width, kv_heads * dim), torch.float32)
    staging = keys
    if k_dtype != torch.float32:
        staging = scratch.take("staging", (max_width, kv_heads * dim), k_dtype)
    tiles = []
    offset = 0
    for slots, lane, run in zip(tile_slots, lane_of_tile, _runs(tile_slots), strict=True):
        width = slots.numel()
        size = width * kv_heads * group
        tiles.append(
            KeyTile(
                slots=slots,
                run=run,
                q=q[lane],
                staging=staging[:width],
                keys=keys[:width],
                keys_t=keys[:width].view(width, kv_heads, dim).permute(1, 2, 0),
                scores=scores[offset : offset + size].view(kv_heads, group, width),
            )
        )
        offset += size
    return GatheredScores(q=q, tiles=tuple(tiles))


def _runs(tile_slots: Sequence[torch.Tensor]) -> list[slice | None]:
    """The range of each tile whose slots are consecutive: no break lies inside it."""
    slots = torch.cat(list(tile_slots))
    breaks = torch.zeros_like(slots)
    torch.cumsum(slots.diff() != 1, dim=0, out=breaks[1:])
    widths = torch.tensor([own.numel() for own in tile_slots])
    last = widths.cumsum(0) - 1
    first = last - widths + 1
    return [
        slice(start, start + width) if is_run else None
        for start, width, is_run in zip(
            slots[first].tolist(),
            widths.tolist(),
            (breaks[first] == breaks[last]).tolist(),
            strict=True,
        )
    ]
