"""Decode (eager, captured) and extend of the triton backend against plain masked attention."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.helpers.attention_batches import (
    Geometry,
    Lanes,
    cuda_replaced,
    make_batch,
    make_layer,
    make_runner,
    place,
    random_qkv,
)
from tests.helpers.tapped_backend import ask_for_observation, check_decode
from tests.kernels.attention_reference import Pool, dense_attention
from vtoken_sglang.engine.attention.triton import VTokenTritonAttnBackend, register
from vtoken_sglang.errors import UnsupportedModeError

GEOMETRIES = [Geometry(), Geometry(q_heads=6, kv_heads=2, page_size=16)]
CASES = [
    (ForwardMode.DECODE, [0, 3, 70, 200], [1] * 4),
    (ForwardMode.EXTEND, [0, 0], [1, 40]),
    (ForwardMode.EXTEND, [0, 30, 100], [40, 1, 17]),
    (ForwardMode.MIXED, [64, 20, 99], [30, 1, 1]),
]


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with cuda_replaced():
        yield


def expected(
    runner: SimpleNamespace, lanes: Lanes, q: torch.Tensor, geometry: Geometry
) -> torch.Tensor:
    pool = runner.token_to_kv_pool
    rows = runner.req_to_token_pool.req_to_token
    view = Pool(k=pool.get_key_buffer(0), v=pool.get_value_buffer(0), rows=rows)
    parts, start = [], 0
    for row, span, own in zip(lanes.rows, lanes.spans, lanes.own, strict=True):
        tokens = q[start : start + own]
        parts.append(dense_attention(tokens, view, row, span, geometry.dim**-0.5))
        start += own
    return torch.cat(parts)


def check(
    geometry: Geometry, mode: ForwardMode, prefix: list[int], own: list[int], evicted_share: float
) -> None:
    runner = make_runner(geometry)
    backend = VTokenTritonAttnBackend(runner)
    lanes = place(runner, Lanes(prefix=prefix, own=own), evicted_share=evicted_share)
    batch = make_batch(runner, lanes, mode)
    backend.init_forward_metadata(batch)
    q, k, v = random_qkv(geometry, len(batch.out_cache_loc))
    forward = backend.forward_decode if mode == ForwardMode.DECODE else backend.forward_extend
    out = forward(q, k, v, make_layer(geometry), batch)
    q, out = (tensor.view(-1, geometry.q_heads, geometry.dim) for tensor in (q, out))
    wanted = expected(runner, lanes, q, geometry)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("geometry", "evicted_share"),
    [(GEOMETRIES[0], 0.0), (GEOMETRIES[1], 0.5), (GEOMETRIES[0], 1.0)],
)
@pytest.mark.parametrize(("mode", "prefix", "own"), CASES)
def test_equals_plain_attention(
    geometry: Geometry, evicted_share: float, mode: ForwardMode, prefix: list[int], own: list[int]
) -> None:
    check(geometry, mode, prefix, own, evicted_share)


def test_deterministic_mode() -> None:
    """The unified kernel takes prefix lengths from the live list."""
    with cuda_replaced(enable_deterministic_inference=True):
        for mode, prefix, own in CASES[:3]:
            check(GEOMETRIES[1], mode, prefix, own, 0.5)


@pytest.mark.parametrize("host_lens", [False, True])
def test_captured_decode_with_padded_lanes(host_lens: bool) -> None:
    """Also without host lengths, which this backend does not need."""
    geometry, bs = GEOMETRIES[1], 4
    runner = make_runner(geometry)
    backend = VTokenTritonAttnBackend(runner)
    backend.init_cuda_graph_state(bs, bs)
    padded = SimpleNamespace(
        batch_size=bs,
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=torch.zeros(bs, dtype=torch.int64),
        seq_lens=torch.ones(bs, dtype=torch.int64),
        seq_lens_cpu=None,
        seq_lens_sum=None,
        out_cache_loc=torch.zeros(bs, dtype=torch.int64),
        encoder_lens=None,
        spec_info=None,
    )
    runner.kv_index_translator.bind_runner_slots(padded)
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    for seed in range(2):
        lanes = Lanes(prefix=[60, 130, 5], own=[1, 1, 1])
        place(runner, lanes, evicted_share=0.6, seed=seed)
        batch = make_batch(runner, lanes, ForwardMode.DECODE, host_lens=host_lens)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(padded, name)[:3] = getattr(batch, name)
        padded.kv_loc_plan = batch.kv_loc_plan
        padded.out_cache_loc_is_physical = batch.out_cache_loc_is_physical
        padded.seq_lens_cpu = padded.seq_lens.clone() if host_lens else None
        backend.init_forward_metadata_out_graph(padded)
        q, k, v = random_qkv(geometry, bs)
        out = backend.forward_decode(q, k, v, make_layer(geometry), padded)
        q, out = (tensor.view(-1, geometry.q_heads, geometry.dim) for tensor in (q, out))
        wanted = expected(runner, lanes, q, geometry)
        torch.testing.assert_close(out[:3].double(), wanted, atol=1e-5, rtol=1e-5)
        sink = runner.token_to_kv_pool.get_value_buffer(0)[0].repeat_interleave(3, dim=0)
        torch.testing.assert_close(out[3], sink)


def test_registers_under_the_stock_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention_registry, "ATTENTION_BACKENDS", dict(attention_registry.ATTENTION_BACKENDS)
    )
    register()
    backend = attention_registry.ATTENTION_BACKENDS["triton"](make_runner(Geometry()))
    assert type(backend) is VTokenTritonAttnBackend


def test_sliding_window_models_are_refused() -> None:
    runner = make_runner(Geometry())
    runner.sliding_window_size = 128
    with pytest.raises(UnsupportedModeError, match="sliding-window"):
        VTokenTritonAttnBackend(runner)


def test_observed_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-sum-exp comes from the stock kernel's splits, used and unused ones."""
    ask_for_observation(monkeypatch)
    geometry = GEOMETRIES[1]
    runner = make_runner(geometry)
    backend = VTokenTritonAttnBackend(runner)
    lanes = place(runner, Lanes(prefix=[40, 200, 9], own=[1] * 3), evicted_share=0.5)
    check_decode(backend, runner, lanes, geometry, [0, 1])
