"""Softmax weights that a CPU decode shows: those of plain attention, whatever the tiles."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention_reference import Shape, evict_random, make_pool
from vtoken_sglang.kernels.cpu.attention import AttentionPlan, decode_attention
from vtoken_sglang.kernels.cpu.scratch import Scratch

SCALING = 0.3


@pytest.mark.parametrize("spans", [[5], [40, 300, 40], [9, 5000, 700, 2049, 64]], ids=str)
@pytest.mark.parametrize("shape", [Shape(q_heads=9, kv_heads=3), Shape(q_heads=12, kv_heads=1)])
def test_weights_are_the_softmax_over_live_keys(shape: Shape, spans: list[int]) -> None:
    torch.set_num_threads(1)
    pool = make_pool(spans, shape)
    evict_random(pool.rows, spans, [1] * len(spans), share=0.3)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(len(spans), shape.q_heads, shape.qk_dim, generator=generator)
    row_ids = torch.arange(1, len(spans) + 1)
    plan = AttentionPlan(pool.rows, row_ids, torch.tensor(spans), None, Scratch())
    shown: list[torch.Tensor] = []
    out, silent = torch.empty(q.shape), torch.empty(q.shape)
    decode_attention(
        q,
        pool.k,
        pool.v,
        plan,
        SCALING,
        out,
        lambda weights: shown.extend(weights.of(lane).clone() for lane in range(len(spans))),
    )
    decode_attention(q, pool.k, pool.v, plan, SCALING, silent)
    assert torch.equal(out, silent)
    for lane, slots in enumerate(plan.lanes):
        keys = pool.k[slots].double().repeat_interleave(shape.q_heads // shape.kv_heads, dim=1)
        logits = torch.einsum("hd,khd->hk", q[lane].double(), keys) * SCALING
        expected = logits.softmax(dim=-1)
        torch.testing.assert_close(shown[lane].double(), expected, atol=1e-6, rtol=1e-4)
