"""What several query tokens of one lane give each of its live keys, in plain PyTorch, any device.

For the prompt, where `attention_mass` would walk the keys once per query: here queries are taken in
blocks, each one batch of matrix products and a softmax of its own, so no log-sum-exp is needed.
"""

from __future__ import annotations

import torch

BLOCK_WEIGHTS = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Weights held at once, by kind of device (float32): query heads x queries of a block x keys. On
the CPU they should stay in a cache; on CUDA each block costs launches, whatever its size."""


def add_query_mass(
    q: torch.Tensor,
    keys: torch.Tensor,
    sees: torch.Tensor,
    mass: torch.Tensor,
    *,
    scale: float,
    below_uniform: bool = False,
) -> None:
    """Add to `mass` what the queries give each key, summed over queries and heads.

    Args:
        q: in, [queries, q_heads, dim], any floating dtype.
        keys: in, [n, kv_heads, dim], any floating dtype; live keys in logical order.
        sees: in, int64 [queries], how many of the keys, from the first on, each query sees (>= 1).
        mass: in/out, float32 [n].
        scale: factor on q.k.
        below_uniform: count, instead of weights, those below an equal share (1 / keys seen).
    """
    queries, q_heads, dim = q.shape
    n, kv_heads, _ = keys.shape
    keys_t = keys.float().permute(1, 2, 0)
    entry = torch.arange(n, device=keys.device)
    rows = max(1, BLOCK_WEIGHTS.get(q.device.type, BLOCK_WEIGHTS["cpu"]) // (q_heads * n))
    for begin in range(0, queries, rows):
        part = q[begin : begin + rows].float()
        count = part.shape[0]
        grouped = part.view(count, kv_heads, -1, dim).permute(1, 2, 0, 3)
        logits = torch.bmm(grouped.reshape(kv_heads, -1, dim), keys_t).mul_(scale)
        seen = sees[begin : begin + rows, None]
        hidden = entry[None, :] >= seen
        weights = logits.view(q_heads, count, n).masked_fill_(hidden, float("-inf")).softmax(dim=-1)
        if below_uniform:
            weights = ((weights < 1.0 / seen) & ~hidden).float()
        mass += weights.sum(dim=(0, 1))
