"""Decode and extend attention on CPU over lists of live slots, in plain PyTorch."""

from __future__ import annotations

from typing import Literal

import torch

from vtoken_sglang.kernels.cpu.decode import SeeWeights, run_decode
from vtoken_sglang.kernels.cpu.extend import run_extend
from vtoken_sglang.kernels.cpu.scratch import Scratch
from vtoken_sglang.kernels.cpu.tiling import DecodeTiling, Geometry, cut_tiles
from vtoken_sglang.kernels.pack_live import pack_live

ReadMode = Literal["direct", "live"]
"""How rows are read: every entry up to the logical length, or the live ones."""


class AttentionPlan:
    """One forward's lanes, shared by all layers. Later changes of the rows do not reach it.

        logical row   17 18  0  0 21 | 40 41      (0 = evicted; 40 41 = tokens of this forward)
        live          17 18 21         40 41      kv_len 5, own_len 2

    Logical lengths and RoPE positions stay as the engine set them. Query token i of a lane sees
    exactly the first `kv_len - own_len + i + 1` entries of its list.

    Fields:
        lanes: one slot list per lane, in logical order, each int64 [kv_lens[i]], CPU.
        kv_lens: keys per lane, its own tokens included.
        own_lens: query tokens per lane.
        scratch: work buffers.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        row_ids: torch.Tensor,
        seq_lens: torch.Tensor,
        own_lens: torch.Tensor | None,
        scratch: Scratch,
        *,
        mode: ReadMode = "live",
    ) -> None:
        """Read a batch's rows.

        Args:
            rows: the engine's row table, int32 [num_rows, width], CPU; 0 = evicted.
            row_ids: row of each lane, int64 [bs].
            seq_lens: logical length of each lane including its own tokens, integer [bs].
            own_lens: tokens each lane computes in this forward, integer [bs]; None: one each
                (decode). They are alive; a lane of row 0, padding, reads the sink instead.
            scratch: work buffers; one forward at a time may use them.
            mode: "direct" only for rows that nothing was evicted from.
        """
        own = torch.ones_like(seq_lens) if own_lens is None else own_lens
        max_span = int(seq_lens.max()) if seq_lens.numel() else 0
        kv_lens = seq_lens
        if mode == "live":
            inside = torch.arange(max_span) < seq_lens.unsqueeze(1)
            kv_lens = ((rows[row_ids, :max_span] != 0) & inside).sum(dim=1).maximum(own)
        indptr = torch.zeros(len(kv_lens) + 1, dtype=torch.int32)
        torch.cumsum(kv_lens, dim=0, out=indptr[1:])
        slots = torch.empty(int(indptr[-1]), dtype=torch.int64)
        pack_live(rows, row_ids, seq_lens, indptr, slots, max_span=max_span)
        self.kv_lens: list[int] = kv_lens.tolist()
        self.own_lens: list[int] = own.tolist()
        self.lanes = torch.split(slots, self.kv_lens)
        self.scratch = scratch
        self._single = [lane for lane, own_len in enumerate(self.own_lens) if own_len == 1]
        self._tilings: dict[Geometry, DecodeTiling] = {}

    def tiling(self, q_heads: int, k_buffer: torch.Tensor) -> DecodeTiling:
        """Return the tiling of the one-token lanes for a layer, cut when first asked for."""
        num_slots, kv_heads, dim = k_buffer.shape
        geometry = Geometry(
            kv_heads=kv_heads, group=q_heads // kv_heads, dim=dim, k_dtype=k_buffer.dtype
        )
        tiling = self._tilings.get(geometry)
        if tiling is None:
            lanes = [self.lanes[lane] for lane in self._single]
            tiling = cut_tiles(lanes, geometry, num_slots, self.scratch)
            self._tilings[geometry] = tiling
        return tiling


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    out: torch.Tensor,
    seen: SeeWeights | None = None,
) -> None:
    """One query token per lane against its live keys.

    Args:
        q: in, [bs, q_heads, qk_dim], contiguous.
        k_buffer: in, [num_slots, kv_heads, qk_dim], contiguous; any floating dtype.
        v_buffer: in, [num_slots, kv_heads, v_dim], contiguous; float32, bfloat16 or float16.
        plan: in, lanes of the batch, one own token each.
        scaling: factor on the scores.
        out: out, [bs, q_heads, v_dim], dtype of `q`.
        seen: shown the softmax weights; lanes are the batch's.
    """
    tiling = plan.tiling(q.shape[1], k_buffer)
    out.copy_(run_decode(tiling, q, k_buffer, v_buffer, scaling, seen))


def extend_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """`own_lens[i]` query tokens per lane, causal over the lane's live keys.

    Only the new rows are computed. Lanes with one own token (the decode lanes of a mixed batch,
    or a one-token prompt rest) go through the decode path and get its bits. Arguments as in
    `decode_attention`, with the lanes' query tokens one after the other in dimension 0.
    """
    single: list[int] = []
    start = 0
    for slots, own in zip(plan.lanes, plan.own_lens, strict=True):
        stop = start + own
        if own == 1:
            single.append(start)
        elif own:
            run_extend(
                q[start:stop],
                k_buffer,
                v_buffer,
                slots,
                scaling,
                out[start:stop],
                plan.scratch,
            )
        start = stop
    if single:
        rows = torch.tensor(single)
        tiling = plan.tiling(q.shape[1], k_buffer)
        result = run_decode(tiling, q[rows], k_buffer, v_buffer, scaling)
        out[rows] = result.to(out.dtype)
