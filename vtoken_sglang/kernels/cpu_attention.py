"""Decode and extend attention on CPU over a packed slot list, in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vtoken_sglang.kernels.cpu_scratch import Scratch
from vtoken_sglang.kernels.packed_slots import PackedSlots

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Host-side description of one forward's lanes, shared by all layers.

    Fields:
        slots: one slot list per lane, each int64 [kv_lens[i]], CPU.
        kv_lens: live keys per lane.
        own_lens: query tokens per lane.
    """

    slots: tuple[torch.Tensor, ...]
    kv_lens: tuple[int, ...]
    own_lens: tuple[int, ...]


def plan_attention(packed: PackedSlots, own_lens: torch.Tensor) -> AttentionPlan:
    """Prepare a packed batch for `decode_attention` or `extend_attention`.

    Args:
        packed: slots per lane, on CPU.
        own_lens: query tokens per lane, shape [bs], int64, CPU.
    """
    kv_lens = packed.lens.tolist()
    return AttentionPlan(
        slots=torch.split(packed.slots, kv_lens),
        kv_lens=tuple(kv_lens),
        own_lens=tuple(own_lens.tolist()),
    )


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    out: torch.Tensor,
    scratch: Scratch,
) -> None:
    """One query token per lane against its live keys.

    Args:
        q: in, [bs, q_heads, qk_dim].
        k_buffer: in, [num_slots, kv_heads, qk_dim], any floating dtype.
        v_buffer: in, [num_slots, kv_heads, v_dim].
        plan: in, lanes of the batch; every lane has at least one key.
        scaling: factor on the scores.
        out: out, [bs, q_heads, v_dim], dtype of `q`.
        scratch: work buffers.
    """
    for lane, slots in enumerate(plan.slots):
        out[lane] = _lane_decode(q[lane], k_buffer, v_buffer, slots, scaling, scratch)


def extend_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    out: torch.Tensor,
    scratch: Scratch,
) -> None:
    """`own_lens[i]` query tokens per lane, causal over the lane's live keys.

    Only the new rows are computed. Shapes as in `decode_attention`, with the lanes' query tokens
    one after the other in dimension 0 of `q` and `out`.
    """
    start = 0
    for slots, own in zip(plan.slots, plan.own_lens, strict=True):
        stop = start + own
        if own == 1:
            out[start] = _lane_decode(q[start], k_buffer, v_buffer, slots, scaling, scratch)
        elif own:
            _lane_extend(
                q[start:stop], k_buffer, v_buffer, slots, scaling, out[start:stop], scratch
            )
        start = stop


def _gather(
    buffer: torch.Tensor, slots: torch.Tensor, name: str, dtype: torch.dtype, scratch: Scratch
) -> torch.Tensor:
    """Copy slots of one buffer to scratch, [len, kv_heads, dim], cast to `dtype`."""
    shape = (slots.numel(), *buffer.shape[1:])
    copy = scratch.take(name, shape, buffer.dtype)
    torch.index_select(buffer, 0, slots, out=copy)
    if buffer.dtype == dtype:
        return copy
    return scratch.take(name, shape, dtype).copy_(copy)


def _lane_decode(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    scratch: Scratch,
) -> torch.Tensor:
    """Return [q_heads, v_dim] of one query token; arithmetic in float32."""
    q_heads, kv_heads = q.shape[0], k_buffer.shape[1]
    keys = _gather(k_buffer, slots, "k", torch.float32, scratch)
    grouped = (q.float() * scaling).view(kv_heads, q_heads // kv_heads, -1)
    weights = torch.bmm(grouped, keys.permute(1, 2, 0)).softmax(dim=-1)
    values = _gather(v_buffer, slots, "v", torch.float32, scratch)
    return torch.bmm(weights, values.transpose(0, 1)).view(q_heads, -1)


def _lane_extend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
    scratch: Scratch,
) -> None:
    """Causal attention of one lane: own tokens among themselves, then the prefix merged in.

    The two parts need no [own, kv] mask: the prefix is seen by every query token, and the own
    part is square and causal. They are joined by their log-sum-exp.
    """
    own, q_heads, dim = q.shape
    kv_heads, v_dim = k_buffer.shape[1], v_buffer.shape[2]
    group = q_heads // kv_heads
    prefix = slots.numel() - own
    keys = _gather(k_buffer, slots, "k", q.dtype, scratch).transpose(0, 1)
    values = _gather(v_buffer, slots, "v", q.dtype, scratch).transpose(0, 1)
    if v_dim < dim:
        values = torch.nn.functional.pad(values, (0, dim - v_dim))
    elif v_dim > dim:
        keys = torch.nn.functional.pad(keys, (0, v_dim - dim))
        q = torch.nn.functional.pad(q, (0, v_dim - dim))
    width = max(dim, v_dim)
    # [kv_heads, group, own, width]: the group is a batch of queries over one key head (stride 0).
    grouped = q.view(own, kv_heads, group, width).permute(1, 2, 0, 3)
    own_keys = keys[:, None, prefix:].expand(-1, group, -1, -1)
    own_values = values[:, None, prefix:].expand(-1, group, -1, -1)
    result, lse = _flash(grouped, own_keys, own_values, 0.0, True, scale=scaling)
    if prefix:
        folded = grouped.reshape(1, kv_heads, group * own, width)
        before, before_lse = _flash(
            folded, keys[None, :, :prefix], values[None, :, :prefix], scale=scaling
        )
        before = before.reshape(kv_heads, group, own, width)
        share = torch.sigmoid(before_lse.view(kv_heads, group, own) - lse).unsqueeze(-1)
        result = torch.lerp(result.float(), before.float(), share)
    out.view(own, kv_heads, group, v_dim).copy_(result[..., :v_dim].permute(2, 0, 1, 3))
