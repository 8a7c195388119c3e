"""Decode and extend attention on CPU over a packed slot list, in plain PyTorch."""

from __future__ import annotations

import torch

from vtoken_sglang.kernels.cpu_decode import SeeWeights, run_decode
from vtoken_sglang.kernels.cpu_extend import run_extend
from vtoken_sglang.kernels.cpu_scratch import Scratch
from vtoken_sglang.kernels.cpu_tiling import DecodeTiling, Geometry, cut_tiles
from vtoken_sglang.kernels.packed_slots import PackedSlots


class AttentionPlan:
    """One forward's lanes, shared by all layers.

    Fields:
        lanes: one slot list per lane, each int64 [kv_lens[i]], CPU.
        kv_lens: live keys per lane.
        own_lens: query tokens per lane.
    """

    def __init__(self, packed: PackedSlots, own_lens: torch.Tensor, scratch: Scratch) -> None:
        """Prepare a packed batch.

        Args:
            packed: slots per lane, on CPU; every lane holds at least its own tokens.
            own_lens: query tokens per lane, shape [bs], int64, CPU.
            scratch: work buffers; one forward at a time may use them.
        """
        self.kv_lens: list[int] = packed.lens.tolist()
        self.own_lens: list[int] = own_lens.tolist()
        self.lanes = torch.split(packed.slots, self.kv_lens)
        self.scratch = scratch
        self._single = [lane for lane, own in enumerate(self.own_lens) if own == 1]
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
