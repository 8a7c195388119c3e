"""What a prompt's queries give each key, in blocks of any size, against one explicit softmax."""

from __future__ import annotations

import pytest
import torch

from vtoken_sglang.kernels.attention_mass import query_mass

QUERIES, Q_HEADS, KV_HEADS, DIM, KEYS, SCALE = 11, 6, 2, 8, 40, 0.4


@pytest.mark.parametrize("block", [1, 1000, 1 << 20])
@pytest.mark.parametrize("max_over_heads", [False, True])
def test_weights_are_pooled_over_queries_then_heads(
    block: int, max_over_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(query_mass.BLOCK_WEIGHTS, "cpu", block)
    draw = torch.Generator().manual_seed(7)
    q = torch.randn(QUERIES, Q_HEADS, DIM, generator=draw)
    keys = torch.randn(KEYS, KV_HEADS, DIM, generator=draw)
    sees = torch.arange(KEYS - QUERIES + 1, KEYS + 1)
    mass = torch.ones(KEYS)
    query_mass.add_query_mass(q, keys, sees, mass, scale=SCALE, max_over_heads=max_over_heads)
    each = keys.double().repeat_interleave(Q_HEADS // KV_HEADS, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q.double(), each) * SCALE
    hidden = torch.arange(KEYS)[None] >= sees[:, None]
    by_head = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1).sum(dim=1)
    expected = by_head.amax(dim=0) if max_over_heads else by_head.sum(dim=0)
    torch.testing.assert_close(mass - 1, expected.float(), rtol=1e-4, atol=1e-5)
