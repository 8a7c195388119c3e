"""Several query tokens of one lane, causal over its live keys, on CPU, in plain PyTorch."""

from __future__ import annotations

import torch

from vtoken_sglang.kernels.cpu.scratch import Scratch

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def run_extend(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
    scratch: Scratch,
) -> None:
    """Causal attention of one lane: own tokens among themselves, then the prefix merged in.

    The prefix is seen by every query token and the own part is square and causal, so neither
    needs an [own, kv] mask; the two are joined by their log-sum-exp.

    Args:
        q: in, [own, q_heads, dim], the lane's last `own` tokens.
        k_buffer: in, [num_slots, kv_heads, dim].
        v_buffer: in, [num_slots, kv_heads, v_dim].
        slots: in, prefix slots then own slots, int64, at least `own`.
        scaling: factor on the scores.
        out: out, [own, q_heads, v_dim].
        scratch: work buffers.
    """
    own, q_heads, dim = q.shape
    kv_heads, v_dim = k_buffer.shape[1], v_buffer.shape[2]
    group, prefix = q_heads // kv_heads, slots.numel() - own
    keys = _gather(k_buffer, slots, "extend keys", q.dtype, scratch)
    values = _gather(v_buffer, slots, "extend values", q.dtype, scratch)
    width = max(dim, v_dim)
    if dim != v_dim:
        q, keys, values = (_pad_to(tensor, width) for tensor in (q, keys, values))
    keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    # [kv_heads, group, own, width]: a group's queries share one key head (stride 0, no repeat).
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


def _pad_to(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Append zeros to the last dimension, which change no score and no used output."""
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]))
