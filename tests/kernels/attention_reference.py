"""Dense float64 attention and random pools for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Attention geometry of one test case."""

    q_heads: int
    kv_heads: int
    qk_dim: int = 16
    v_dim: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """K/V buffers [num_slots, kv_heads, dim] and a row table [num_rows, width] over them."""

    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor


def make_pool(
    spans: list[int],
    shape: Shape,
    *,
    page_size: int = 1,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Pool:
    """Give row `i + 1` `spans[i]` positions in randomly placed pages; row 0 stays the sink."""
    gen = torch.Generator().manual_seed(seed)
    pages = [-(-span // page_size) for span in spans]
    total = sum(pages)
    order = torch.randperm(total, generator=gen) + 1
    num_slots = (total + 1) * page_size
    rows = torch.zeros(len(spans) + 1, max(spans) + 3, dtype=torch.int32)
    offset = 0
    for lane, span in enumerate(spans):
        own_pages = order[offset : offset + pages[lane]]
        slots = own_pages[:, None] * page_size + torch.arange(page_size)
        rows[lane + 1, :span] = slots.flatten()[:span].to(torch.int32)
        offset += pages[lane]
    k = torch.randn(num_slots, shape.kv_heads, shape.qk_dim, generator=gen)
    v = torch.randn(num_slots, shape.kv_heads, shape.v_dim, generator=gen)
    return Pool(k=k.to(dtype), v=v.to(dtype), rows=rows)


def evict_random(
    rows: torch.Tensor, spans: list[int], own_lens: list[int], *, share: float, seed: int = 0
) -> None:
    """Zero a share of each row's prefix positions in place (evicted tokens)."""
    gen = torch.Generator().manual_seed(seed)
    for lane, (span, own) in enumerate(zip(spans, own_lens, strict=True)):
        evicted = torch.rand(span - own, generator=gen) < share
        rows[lane + 1, : span - own][evicted] = 0


def dense_attention(
    q: torch.Tensor, pool: Pool, row: int, span: int, scaling: float
) -> torch.Tensor:
    """Attend `q` [own, q_heads, qk_dim], the span's last tokens, to the row's live positions."""
    own, q_heads = q.shape[:2]
    slots = pool.rows[row, :span].long()
    pos = torch.arange(span)
    alive = (slots != 0) | (pos >= span - own)
    seen = alive[None, :] & (pos[None, :] <= (span - own + torch.arange(own))[:, None])
    repeat = q_heads // pool.k.shape[1]
    keys = pool.k[slots].double().repeat_interleave(repeat, dim=1)
    values = pool.v[slots].double().repeat_interleave(repeat, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scaling
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
