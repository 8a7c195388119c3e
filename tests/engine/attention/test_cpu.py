"""Our torch_native backend against SGLang's own, on SGLang's pool and layer objects."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from vtoken_sglang.engine.attention.cpu import VTokenTorchAttnBackend, register
from vtoken_sglang.errors import UnsupportedModeError

Q_HEADS, KV_HEADS, DIM, LAYERS = 9, 3, 16, 2
POOL_SLOTS = 600


def make_runner(dtype: torch.dtype = torch.float32, page_size: int = 1) -> SimpleNamespace:
    pool = MHATokenToKVPool(
        size=POOL_SLOTS,
        page_size=page_size,
        dtype=dtype,
        head_num=KV_HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    rows = torch.zeros(8, 256, dtype=torch.int32)
    return SimpleNamespace(
        device="cpu",
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=rows),
    )


def make_layer(layer_id: int = 0, **options: object) -> RadixAttention:
    return RadixAttention(Q_HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id, **options)


def make_batch(
    runner: SimpleNamespace, mode: ForwardMode, prefix_lens: list[int], own_lens: list[int]
) -> SimpleNamespace:
    """Place the lanes' tokens in scattered slots and describe the forward as SGLang does."""
    order = torch.randperm(POOL_SLOTS, generator=torch.Generator().manual_seed(0)) + 1
    rows = runner.req_to_token_pool.req_to_token
    start, written = 0, []
    for lane, (prefix, own) in enumerate(zip(prefix_lens, own_lens, strict=True)):
        slots = order[start : start + prefix + own]
        rows[lane + 1, : prefix + own] = slots.to(torch.int32)
        written.append(slots[prefix:])
        start += prefix + own
    prefix, own = torch.tensor(prefix_lens), torch.tensor(own_lens)
    return SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=torch.arange(1, len(own_lens) + 1),
        seq_lens=prefix + own,
        extend_prefix_lens=None if mode == ForwardMode.DECODE else prefix,
        extend_seq_lens=None if mode == ForwardMode.DECODE else own,
        out_cache_loc=torch.cat(written),
        encoder_lens=None,
        encoder_out_cache_loc=None,
    )


def fill_pool(runner: SimpleNamespace) -> None:
    gen = torch.Generator().manual_seed(1)
    for buffer in (*runner.token_to_kv_pool.k_buffer, *runner.token_to_kv_pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=gen))


def random_qkv(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(2)
    sizes = (Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
    q, k, v = (torch.randn(tokens, size, generator=gen).to(dtype) for size in sizes)
    return q, k.view(tokens, KV_HEADS, DIM), v.view(tokens, KV_HEADS, DIM)


def run(
    backend: TorchNativeAttnBackend,
    batch: SimpleNamespace,
    layer: RadixAttention,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    return forward(*qkv, layer, batch)


CASES = [
    (ForwardMode.DECODE, [0, 3, 70, 150], [1, 1, 1, 1]),
    (ForwardMode.EXTEND, [0, 0], [1, 90]),
    (ForwardMode.EXTEND, [0, 30, 100], [40, 1, 17]),
    (ForwardMode.MIXED, [64, 20, 99], [30, 1, 1]),
]
CASES_WITH_PREFIX = [case for case in CASES if any(case[1])]


@pytest.mark.parametrize(("mode", "prefix_lens", "own_lens"), CASES)
@pytest.mark.parametrize("slot_mode", ["direct", "live"])
@pytest.mark.parametrize("layer_id", [0, 1])
def test_equals_stock(
    mode: ForwardMode, prefix_lens: list[int], own_lens: list[int], slot_mode: str, layer_id: int
) -> None:
    runner = make_runner()
    fill_pool(runner)
    batch = make_batch(runner, mode, prefix_lens, own_lens)
    layer, qkv = make_layer(layer_id), random_qkv(sum(own_lens), torch.float32)
    expected = run(TorchNativeAttnBackend(runner), batch, layer, qkv)
    stored = [buffer.clone() for buffer in runner.token_to_kv_pool.k_buffer]
    got = run(VTokenTorchAttnBackend(runner, slot_mode), batch, layer, qkv)
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)
    for before, after in zip(stored, runner.token_to_kv_pool.k_buffer, strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(("mode", "prefix_lens", "own_lens"), CASES)
def test_bfloat16_is_close_to_stock(
    mode: ForwardMode, prefix_lens: list[int], own_lens: list[int]
) -> None:
    runner = make_runner(torch.bfloat16)
    fill_pool(runner)
    batch = make_batch(runner, mode, prefix_lens, own_lens)
    layer, qkv = make_layer(), random_qkv(sum(own_lens), torch.bfloat16)
    expected = run(TorchNativeAttnBackend(runner), batch, layer, qkv)
    got = run(VTokenTorchAttnBackend(runner, "live"), batch, layer, qkv)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_writes_the_new_tokens_before_reading_them() -> None:
    runner = make_runner()
    fill_pool(runner)
    batch = make_batch(runner, ForwardMode.DECODE, [5], [1])
    qkv = random_qkv(1, torch.float32)
    run(VTokenTorchAttnBackend(runner, "live"), batch, make_layer(), qkv)
    stored = runner.token_to_kv_pool.get_key_buffer(0)[batch.out_cache_loc]
    assert torch.equal(stored, qkv[1])


@pytest.mark.parametrize(("mode", "prefix_lens", "own_lens"), CASES_WITH_PREFIX)
def test_live_mode_drops_evicted_tokens(
    mode: ForwardMode, prefix_lens: list[int], own_lens: list[int]
) -> None:
    """Zeroed entries equal a shorter row without them; direct mode reads them as the sink."""
    runner = make_runner()
    fill_pool(runner)
    batch = make_batch(runner, mode, prefix_lens, own_lens)
    rows = runner.req_to_token_pool.req_to_token
    layer, qkv = make_layer(), random_qkv(sum(own_lens), torch.float32)
    shorter, shorter_prefix = torch.zeros_like(rows), []
    for lane, (prefix, own) in enumerate(zip(prefix_lens, own_lens, strict=True), start=1):
        rows[lane, 1:prefix:3] = 0
        live = rows[lane, : prefix + own]
        live = live[live != 0]
        shorter[lane, : live.numel()] = live
        shorter_prefix.append(live.numel() - own)
    got = run(VTokenTorchAttnBackend(runner, "live"), batch, layer, qkv)
    direct = run(VTokenTorchAttnBackend(runner, "direct"), batch, layer, qkv)
    rows.copy_(shorter)
    batch.seq_lens = torch.tensor(shorter_prefix) + torch.tensor(own_lens)
    batch.extend_prefix_lens = torch.tensor(shorter_prefix)
    expected = run(TorchNativeAttnBackend(runner), batch, layer, qkv)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)
    assert not torch.allclose(direct, expected, atol=1e-3)


def test_plan_is_fixed_at_the_start_of_the_forward() -> None:
    runner = make_runner()
    fill_pool(runner)
    batch = make_batch(runner, ForwardMode.DECODE, [30], [1])
    backend, qkv = VTokenTorchAttnBackend(runner, "live"), random_qkv(1, torch.float32)
    expected = run(backend, batch, make_layer(), qkv)
    runner.req_to_token_pool.req_to_token[1, :10] = 0
    assert torch.equal(backend.forward_decode(*qkv, make_layer(), batch), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"is_cross_attention": True},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"sliding_window_size": 64},
        {"logit_cap": 30.0},
    ],
)
def test_refuses_layers_that_the_plan_does_not_describe(options: dict[str, object]) -> None:
    runner = make_runner()
    batch = make_batch(runner, ForwardMode.DECODE, [5], [1])
    backend = VTokenTorchAttnBackend(runner, "live")
    with pytest.raises(UnsupportedModeError, match="layer 0"):
        run(backend, batch, make_layer(**options), random_qkv(1, torch.float32))


def test_refuses_a_pool_of_another_dtype() -> None:
    with pytest.raises(UnsupportedModeError, match="kv-cache-dtype"):
        VTokenTorchAttnBackend(make_runner(torch.float8_e4m3fn), "live")


def test_register_replaces_only_the_stock_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = dict(attention_registry.ATTENTION_BACKENDS)
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", dict(stock))
    register("live")
    backend = attention_registry.ATTENTION_BACKENDS["torch_native"](make_runner())
    assert isinstance(backend, VTokenTorchAttnBackend)
    assert backend.mode == "live"
    changed = {
        name
        for name, factory in attention_registry.ATTENTION_BACKENDS.items()
        if stock[name] is not factory
    }
    assert changed == {"torch_native"}
