"""Attention of decode steps seen on CUDA: static buffers, one kernel per observed layer.

    host, before the forward   `watch`     which lanes, how long: one upload from pinned memory
    device                     `pack_live` the lanes' slots and positions, once for all layers
    each observed layer        `on_layer`  q, keys and lse -> scores, also inside a captured graph

A graph that is replayed runs the kernels of every observed layer whatever is asked for, since no
host code runs then; lanes that nobody watches have score row 0 and their programs end at once.
Everything a graph holds the address of is allocated once, before the first capture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from vtoken_sglang.kernels.attention_mass import attention_mass
from vtoken_sglang.kernels.pack_live import pack_live

SCORE_BYTES: Final = 1 << 30
"""Most memory of the score table."""
LISTED_PER_SLOT: Final = 4
"""Entries of the lists for each slot of the pool; 8 bytes each."""

_SCORE_ROW, _BELOW_UNIFORM, _SPAN, _INDPTR = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLane:
    """One decode lane whose query is observed.

    Fields:
        lane: its index in the batch.
        score_row: where its weights go.
        below_uniform: count small weights instead of adding weights.
        span: logical length; live_len: live tokens in it, the query's own included.
    """

    lane: int
    score_row: int
    below_uniform: bool
    span: int
    live_len: int


class DecodeTap:
    """The buffers of one model runner.

    Fields:
        scores: float32 [1 + capacity, width], the score table; row 0 is never written.
        layers: observed layers.
        active: whether the forward prepared last has a watched lane.
        q_heads: query heads of the layers, known once one ran.
        room: live tokens of all watched lanes of a step together, at most.
    """

    def __init__(
        self, rows: torch.Tensor, num_slots: int, layers: frozenset[int], score_bytes: int
    ) -> None:
        """
        Args:
            rows: the engine's req_to_token, int32 [num_rows, width].
            num_slots: slots of the KV pool.
        """
        num_rows, width = rows.shape
        self._rows = rows
        self.layers = layers
        self.active = False
        self.q_heads = 0
        capacity = max(1, min(2 * num_rows, score_bytes // (4 * width)))
        device = rows.device
        self.scores = torch.zeros(1 + capacity, width, device=device)
        # int32 [4, lanes + 1]: see `_SCORE_ROW` and the others; one upload fills all of it. Padded
        # so that each of the four starts at a multiple of 16 bytes.
        padded = -(-(num_rows + 1) // 4) * 4
        self._lanes = torch.zeros(4, padded, dtype=torch.int32, device=device)
        self._queries = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        # A shared prefix is listed once per lane, so the lists may exceed the pool many times over.
        self.room = min(num_rows * width, LISTED_PER_SLOT * num_slots)
        self._slots = torch.zeros(self.room, dtype=torch.int32, device=device)
        self._positions = torch.zeros(self.room, dtype=torch.int32, device=device)

    def watch(self, row_ids: torch.Tensor, lanes: list[WatchedLane], clear: list[int]) -> None:
        """Prepare a decode step. Enqueues on the current stream, the forward's.

        Args:
            row_ids: integer [bs], the device's row of each lane.
            lanes: the watched ones, by ascending lane, `room` live tokens at most; none of the
                others is observed.
            clear: score rows to zero first.
        """
        if not lanes and not clear and not self.active:
            return
        host = torch.zeros(self._lanes.shape, dtype=torch.int32, pin_memory=self._rows.is_cuda)
        # Filled on the host through numpy: element by element a tensor would be slow.
        table = host.numpy()
        assert sum(watched.live_len for watched in lanes) <= self.room
        for watched in lanes:
            table[_SCORE_ROW, watched.lane] = watched.score_row
            table[_BELOW_UNIFORM, watched.lane] = watched.below_uniform
            table[_SPAN, watched.lane] = watched.span
            table[_INDPTR, watched.lane + 1] = watched.live_len
        table[_INDPTR].cumsum(out=table[_INDPTR])
        self._lanes.copy_(host, non_blocking=True)
        if clear:
            index = torch.tensor(clear, dtype=torch.int64, pin_memory=self._rows.is_cuda)
            self.scores.index_fill_(0, index.to(self._rows.device, non_blocking=True), 0.0)
        self.active = bool(lanes)
        if self.active:
            count = len(row_ids)
            pack_live(
                self._rows,
                row_ids,
                self._lanes[_SPAN, :count],
                self._lanes[_INDPTR, : count + 1],
                self._slots,
                self._positions,
                max_span=max(watched.span for watched in lanes),
            )

    def on_layer(
        self, q: torch.Tensor, k_buffer: torch.Tensor, lse: torch.Tensor, scale: float
    ) -> None:
        """Add one layer's weights. May be captured.

        Args:
            q: [bs, q_heads, dim], one query per lane, padded ones included.
            k_buffer: the layer's keys, [num_slots, kv_heads, dim].
            lse: float32 [bs, q_heads], natural logarithm.
            scale: factor on q.k.
        """
        count = q.shape[0]
        self.q_heads = q.shape[1]
        attention_mass(
            q,
            k_buffer,
            self._queries[: count + 1],
            self._lanes[_INDPTR, : count + 1],
            self._slots,
            self._positions,
            self._lanes[_SCORE_ROW, :count],
            lse,
            self.scores,
            scale=scale,
            below_uniform=self._lanes[_BELOW_UNIFORM, :count],
        )


_tap: DecodeTap | None = None


def make_tap(
    rows: torch.Tensor, num_slots: int, layers: frozenset[int], score_bytes: int = SCORE_BYTES
) -> DecodeTap:
    """The process's tap, made when first asked for: backends of one runner share it."""
    global _tap
    if _tap is None or _tap.scores.device != rows.device:
        _tap = DecodeTap(rows, num_slots, layers, score_bytes)
        if rows.is_cuda:
            from vtoken_sglang.kernels.pack_live.triton import warm_up

            warm_up(rows, torch.int32, spans_dtype=torch.int32, positions=True)
    return _tap


def current_tap() -> DecodeTap | None:
    """The tap of this process's backends; None if they observe otherwise (CPU) or not at all."""
    return _tap
