"""The flashinfer backend over rows with holes, on the stand-in, against plain attention."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.layers.attention import attention_registry
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.helpers.attention_batches import (
    Geometry,
    Lanes,
    StockIndexKernel,
    cuda_replaced,
    make_batch,
    make_layer,
    make_runner,
    place,
    random_qkv,
)
from tests.kernels.attention_reference import Pool, dense_attention
from vtoken_sglang.engine.attention.flashinfer import VTokenFlashInferAttnBackend, register
from vtoken_sglang.errors import UnsupportedModeError

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
GEOMETRIES = [
    Geometry(),
    Geometry(q_heads=9, kv_heads=3, page_size=16),
    Geometry(q_heads=8, kv_heads=1, dim=32, page_size=4),
]
EXTENDS = [
    (ForwardMode.EXTEND, [0, 0], [1, 90]),
    (ForwardMode.EXTEND, [0, 30, 100], [40, 1, 17]),
    (ForwardMode.EXTEND, [200, 64, 33, 1], [16, 64, 1, 7]),
    (ForwardMode.MIXED, [64, 20, 99, 300], [30, 1, 1, 1]),
]


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with cuda_replaced():
        yield


def backend_for(geometry: Geometry, **options: object) -> VTokenFlashInferAttnBackend:
    return VTokenFlashInferAttnBackend(make_runner(geometry), **options)


def forward(
    backend: VTokenFlashInferAttnBackend,
    batch: SimpleNamespace,
    geometry: Geometry,
    layer_id: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one layer; returns (q, output), both [tokens, q_heads, dim]."""
    layer = make_layer(geometry, layer_id)
    q, k, v = random_qkv(geometry, len(batch.out_cache_loc), seed=layer_id)
    backend.init_forward_metadata(batch)
    run = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    out = run(q, k, v, layer, batch)
    shape = (-1, geometry.q_heads, geometry.dim)
    return q.view(shape), out.view(shape)


def expected(
    runner: SimpleNamespace, lanes: Lanes, q: torch.Tensor, geometry: Geometry, layer_id: int = 0
) -> torch.Tensor:
    pool = runner.token_to_kv_pool
    view = Pool(
        k=pool.get_key_buffer(layer_id).double(),
        v=pool.get_value_buffer(layer_id).double(),
        rows=runner.req_to_token_pool.req_to_token,
    )
    parts, start = [], 0
    for row, span, own in zip(lanes.rows, lanes.spans, lanes.own, strict=True):
        tokens = q[start : start + own]
        parts.append(dense_attention(tokens, view, row, span, geometry.dim**-0.5))
        start += own
    return torch.cat(parts)


def poison_unread(runner: SimpleNamespace) -> None:
    """NaN in every slot that no row names: a wrong list would show."""
    named = set(runner.req_to_token_pool.req_to_token.flatten().tolist())
    pool = runner.token_to_kv_pool
    unread = [slot for slot in range(len(pool.k_buffer[0])) if slot not in named]
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[unread] = torch.nan


def check(
    geometry: Geometry,
    mode: ForwardMode,
    prefix: list[int],
    own: list[int],
    *,
    evicted_share: float = 0.5,
    seed: int = 0,
    layer_id: int = 0,
    prepare: object = None,
) -> VTokenFlashInferAttnBackend:
    runner = make_runner(geometry)
    backend = VTokenFlashInferAttnBackend(runner)
    if callable(prepare):
        prepare(backend)
    lanes = place(runner, Lanes(prefix=prefix, own=own), evicted_share=evicted_share, seed=seed)
    poison_unread(runner)
    batch = make_batch(runner, lanes, mode)
    q, out = forward(backend, batch, geometry, layer_id)
    wanted = expected(runner, lanes, q, geometry, layer_id)
    limit = TOLERANCE[geometry.dtype]
    torch.testing.assert_close(out.double(), wanted, atol=limit, rtol=limit)
    return backend


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("evicted_share", [0.0, 0.5, 1.0])
def test_decode(geometry: Geometry, tensor_cores: bool, evicted_share: float) -> None:
    """Both decode kernels; lanes of length 1, short, long, all but the tail evicted."""

    def prepare(backend: VTokenFlashInferAttnBackend) -> None:
        for wrapper in backend.decode_wrappers:
            wrapper.use_tensor_cores = tensor_cores

    prefix = [0, 3, 70, 250, 1, 33, 64, 128]
    check(
        geometry, ForwardMode.DECODE, prefix, [1] * 8, evicted_share=evicted_share, prepare=prepare
    )


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize(("mode", "prefix", "own"), EXTENDS)
@pytest.mark.parametrize("layer_id", [0, 1])
def test_extend_ragged_and_paged(
    geometry: Geometry, mode: ForwardMode, prefix: list[int], own: list[int], layer_id: int
) -> None:
    backend = check(geometry, mode, prefix, own, layer_id=layer_id)
    assert backend.forward_metadata.use_ragged
    assert backend.forward_metadata.extend_no_prefix == (not any(prefix))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize(("mode", "prefix", "own"), EXTENDS)
def test_extend_paged_only(
    geometry: Geometry, mode: ForwardMode, prefix: list[int], own: list[int]
) -> None:
    def prepare(backend: VTokenFlashInferAttnBackend) -> None:
        backend.use_paged = True

    backend = check(geometry, mode, prefix, own, prepare=prepare)
    assert not backend.forward_metadata.use_ragged


lanes_strategy = st.lists(
    st.tuples(st.integers(0, 120), st.integers(1, 30)), min_size=1, max_size=8
)


@settings(deadline=None, max_examples=40)
@given(
    lanes_strategy,
    st.sampled_from(GEOMETRIES),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_any_batch(
    lanes: list[tuple[int, int]],
    geometry: Geometry,
    evicted_share: float,
    decode: bool,
    paged_only: bool,
    seed: int,
) -> None:
    def prepare(backend: VTokenFlashInferAttnBackend) -> None:
        backend.use_paged = paged_only

    prefix = [entry[0] for entry in lanes]
    own = [1 if decode else entry[1] for entry in lanes]
    mode = ForwardMode.DECODE if decode else ForwardMode.EXTEND
    check(geometry, mode, prefix, own, evicted_share=evicted_share, seed=seed, prepare=prepare)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    geometry = Geometry(q_heads=8, kv_heads=2, dim=64, page_size=16, dtype=dtype, kv_dtype=dtype)
    check(geometry, ForwardMode.DECODE, [40, 300], [1, 1])
    check(geometry, ForwardMode.EXTEND, [40, 0, 300], [5, 33, 70])


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("own", [[1, 1], [30, 5]], ids=["decode", "extend"])
def test_fp8_pool(kv_dtype: torch.dtype, own: list[int]) -> None:
    """Live slots of an fp8 pool; SGLang decodes it on tensor cores. The extend is paged-only: its
    own tokens are then read back as stored, so the comparison is exact up to bfloat16."""
    geometry = Geometry(
        q_heads=4, kv_heads=2, dim=32, page_size=16, dtype=torch.bfloat16, kv_dtype=kv_dtype
    )
    runner = make_runner(geometry)
    backend = VTokenFlashInferAttnBackend(runner)
    backend.use_paged = True
    assert backend.decode_use_tensor_cores
    lanes = place(runner, Lanes(prefix=[40, 150], own=own), evicted_share=0.5)
    mode = ForwardMode.DECODE if own == [1, 1] else ForwardMode.EXTEND
    q, out = forward(backend, make_batch(runner, lanes, mode), geometry)
    wanted = expected(runner, lanes, q, geometry)
    torch.testing.assert_close(out.double(), wanted, atol=3e-2, rtol=3e-2)


def test_deterministic_mode_is_paged_with_fixed_splits() -> None:
    with cuda_replaced(enable_deterministic_inference=True):
        backend = check(Geometry(page_size=16), ForwardMode.EXTEND, [64, 200], [20, 1])
        assert not backend.forward_metadata.use_ragged
        assert backend.prefill_wrappers_paged[0].plans[-1]["fixed_split_size"] == 4096
        backend = check(Geometry(page_size=16), ForwardMode.DECODE, [64, 200], [1, 1])
        assert backend.decode_wrappers[0].plans[-1]["fixed_split_size"] == 2048


def test_a_batch_without_evicted_tokens_takes_the_stock_path() -> None:
    calls = StockIndexKernel.calls
    check(Geometry(), ForwardMode.DECODE, [50, 60], [1, 1], evicted_share=0.0)
    assert StockIndexKernel.calls == calls + 1
    check(Geometry(), ForwardMode.DECODE, [50, 60], [1, 1], evicted_share=0.5)
    assert StockIndexKernel.calls == calls + 1


def test_holes_change_the_answer() -> None:
    """The comparison is not blind to evicted tokens: with them kept, the result differs."""
    geometry = Geometry()
    runner = make_runner(geometry)
    backend = VTokenFlashInferAttnBackend(runner)
    lanes = place(runner, Lanes(prefix=[100], own=[1]), evicted_share=0.0)
    q, full = forward(backend, make_batch(runner, lanes, ForwardMode.DECODE), geometry)
    lanes.dead[lanes.rows[0]] = 40
    runner.req_to_token_pool.req_to_token[lanes.rows[0], :40] = 0
    _, pruned = forward(backend, make_batch(runner, lanes, ForwardMode.DECODE), geometry)
    assert (full - pruned).abs().max() > 1e-2
    torch.testing.assert_close(
        pruned.double(), expected(runner, lanes, q, geometry), atol=1e-5, rtol=1e-5
    )


def test_logical_lengths_stay_with_the_batch() -> None:
    geometry = Geometry()
    runner = make_runner(geometry)
    backend = VTokenFlashInferAttnBackend(runner)
    lanes = place(runner, Lanes(prefix=[100, 7], own=[5, 6]), evicted_share=0.5)
    batch = make_batch(runner, lanes, ForwardMode.EXTEND)
    forward(backend, batch, geometry)
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [105, 13]
    assert batch.extend_prefix_lens.tolist() == batch.extend_prefix_lens_cpu == [100, 7]
    assert batch.seq_lens_sum == 118


def test_registers_under_the_stock_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention_registry, "ATTENTION_BACKENDS", dict(attention_registry.ATTENTION_BACKENDS)
    )
    register()
    runner = make_runner(Geometry(page_size=16))
    backend = attention_registry.ATTENTION_BACKENDS["flashinfer"](runner)
    assert type(backend) is VTokenFlashInferAttnBackend
    runner.kv_index_translator.bind_and_verify_backends([backend])
    runner.use_mla_backend = True
    with pytest.raises(UnsupportedModeError, match="MLA"):
        attention_registry.ATTENTION_BACKENDS["flashinfer"](runner)


def test_sliding_window_models_are_refused() -> None:
    runner = make_runner(Geometry())
    runner.sliding_window_size = 128
    with pytest.raises(UnsupportedModeError, match="sliding-window"):
        VTokenFlashInferAttnBackend(runner)


def test_a_prefill_graph_is_refused() -> None:
    geometry = Geometry()
    runner = make_runner(geometry)
    backend = VTokenFlashInferAttnBackend(runner)
    lanes = place(runner, Lanes(prefix=[10], own=[5]), evicted_share=0.0)
    batch = make_batch(runner, lanes, ForwardMode.EXTEND)
    with pytest.raises(UnsupportedModeError, match="cuda-graph-backend-prefill full"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
