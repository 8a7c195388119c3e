"""Decode through an attention backend with a tap, and the weights that plain attention gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.helpers.attention_batches import (
    LAYERS,
    Geometry,
    Lanes,
    make_batch,
    make_layer,
    random_qkv,
)
from vtoken_sglang.engine.observe import backend_mixin as observation_backends
from vtoken_sglang.engine.observe import decode_tap as observation_tap
from vtoken_sglang.engine.observe.decode_tap import WatchedLane
from vtoken_sglang.options import VTokenConfig


def ask_for_observation(monkeypatch: pytest.MonkeyPatch, layers: str = "all") -> None:
    """Backends made from now on have a tap of their own."""
    config = VTokenConfig(policy="h2o", keep=0.5, observe_layers=layers)
    monkeypatch.setattr(observation_backends, "from_environment", lambda: config)
    monkeypatch.setattr(observation_tap, "_tap", None)


def watch(backend: Any, batch: Any, lanes: Lanes, watched: dict[int, int]) -> None:
    """Watch these lanes (index -> score row) in the decode step `batch`."""
    chosen = [
        WatchedLane(
            lane=lane,
            score_row=score_row,
            below_uniform=False,
            span=lanes.spans[lane],
            live_len=lanes.spans[lane] - lanes.dead[lanes.rows[lane]],
        )
        for lane, score_row in watched.items()
    ]
    backend.tap.watch(batch.req_pool_indices, chosen, clear=[])


def decode_all_layers(
    backend: Any, batch: Any, geometry: Geometry
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q and output of each layer, [lanes, q_heads, dim]."""
    shape = (-1, geometry.q_heads, geometry.dim)
    queries, outs = [], []
    for layer_id in range(LAYERS):
        q, k, v = random_qkv(geometry, len(batch.out_cache_loc), seed=layer_id)
        out = backend.forward_decode(q, k, v, make_layer(geometry, layer_id), batch)
        queries.append(q.view(shape))
        outs.append(out.view(shape))
    return queries, outs


def expected_mass(
    runner: SimpleNamespace,
    lanes: Lanes,
    lane: int,
    queries: list[torch.Tensor],
    layers: list[int],
) -> torch.Tensor:
    """float64 [span], weights of the lane's query summed over heads and layers."""
    row = runner.req_to_token_pool.req_to_token[lanes.rows[lane], : lanes.spans[lane]].long()
    total = torch.zeros(len(row), dtype=torch.float64)
    for layer in layers:
        keys = runner.token_to_kv_pool.get_key_buffer(layer)[row].double()
        q = queries[layer][lane].double()
        keys = keys.repeat_interleave(q.shape[0] // keys.shape[1], dim=1)
        logits = torch.einsum("hd,khd->hk", q, keys) * q.shape[1] ** -0.5
        total += logits.masked_fill(row == 0, -torch.inf).softmax(dim=1).sum(dim=0)
    return total


def check_decode(
    backend: Any, runner: Any, lanes: Lanes, geometry: Geometry, layers: list[int]
) -> None:
    """Watched lanes get plain attention's weights; the others, and row 0, nothing."""
    batch = make_batch(runner, lanes, ForwardMode.DECODE)
    watch(backend, batch, lanes, {1: 3, 2: 1})
    backend.init_forward_metadata(batch)
    queries, _ = decode_all_layers(backend, batch, geometry)
    scores = backend.tap.scores.clone()
    for lane, score_row in ((1, 3), (2, 1)):
        expected = expected_mass(runner, lanes, lane, queries, layers)
        got = scores[score_row, : len(expected)].double()
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    scores[[1, 3]] = 0
    assert not bool(scores.any())
