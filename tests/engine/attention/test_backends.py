"""A scheduler serves only with an attention backend that reads rows as its arm says."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
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
from vtoken_sglang.engine.attention import cpu as attention_cpu
from vtoken_sglang.engine.attention.backends import install_backends, verify_backend
from vtoken_sglang.engine.attention.cpu import VTokenTorchAttnBackend
from vtoken_sglang.engine.attention.flashinfer import VTokenFlashInferAttnBackend
from vtoken_sglang.errors import HookError
from vtoken_sglang.options import VTokenConfig

READS_LIVE = [
    VTokenConfig(),  # hook-only
    VTokenConfig(policy="random", keep=0.5, ablation="naive"),
    VTokenConfig(policy="random", keep=0.5),
]
NATIVE = VTokenConfig(ablation="native")


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with cuda_replaced():
        yield


def runner_with(backend: type, *arguments: Any) -> SimpleNamespace:
    runner = make_runner(Geometry())
    runner.attn_backend = backend(runner, *arguments)
    return runner


@pytest.mark.parametrize("config", READS_LIVE, ids=lambda config: config.arm)
def test_live_slots_are_read_in_every_arm_but_native(config: VTokenConfig) -> None:
    verify_backend(runner_with(VTokenTorchAttnBackend, "live"), config)
    with pytest.raises(HookError, match=f"in mode 'direct', arm '{config.arm}' needs 'live'"):
        verify_backend(runner_with(VTokenTorchAttnBackend, "direct"), config)


def test_native_reads_rows_as_they_are() -> None:
    verify_backend(runner_with(VTokenTorchAttnBackend, "direct"), NATIVE)
    with pytest.raises(HookError, match="in mode 'live', arm 'native' needs 'direct'"):
        verify_backend(runner_with(VTokenTorchAttnBackend, "live"), NATIVE)


@pytest.mark.parametrize("config", [*READS_LIVE, NATIVE], ids=lambda config: config.arm)
def test_the_stock_backend_is_refused_on_cpu(config: VTokenConfig) -> None:
    with pytest.raises(HookError, match="TorchNativeAttnBackend does not read live slots"):
        verify_backend(runner_with(TorchNativeAttnBackend), config)


@pytest.mark.parametrize("config", [*READS_LIVE, NATIVE], ids=lambda config: config.arm)
def test_what_an_arm_registers_is_what_it_is_verified_for(
    monkeypatch: pytest.MonkeyPatch, config: VTokenConfig
) -> None:
    known = dict(attention_registry.ATTENTION_BACKENDS)
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", known)
    install_backends(config)
    runner = make_runner(Geometry())
    runner.attn_backend = known["torch_native"](runner)
    verify_backend(runner, config)


@pytest.mark.parametrize("config", READS_LIVE, ids=lambda config: config.arm)
def test_flashinfer_must_pack_live_slots(config: VTokenConfig) -> None:
    runner = runner_with(VTokenFlashInferAttnBackend)
    runner.device = "cuda"
    verify_backend(runner, config)
    del runner.kv_index_translator.pack_read_stream  # back to the class's own
    with pytest.raises(HookError, match="VTokenFlashInferAttnBackend are not packed from live"):
        verify_backend(runner, config)


def test_a_stock_backend_on_cuda_is_fair_for_native_only() -> None:
    runner = runner_with(TorchNativeAttnBackend)
    runner.device = "cuda"
    verify_backend(runner, NATIVE)
    with pytest.raises(HookError, match="does not read live slots"):
        verify_backend(runner, VTokenConfig())


@pytest.mark.parametrize("config", [READS_LIVE[0], NATIVE], ids=lambda config: config.arm)
def test_every_forward_reads_its_rows_once(
    monkeypatch: pytest.MonkeyPatch, config: VTokenConfig
) -> None:
    """In the arm's mode, although nothing was evicted; and attention reads that plan, not the rows:
    what they say changes under it."""
    known = dict(attention_registry.ATTENTION_BACKENDS)
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", known)
    install_backends(config)
    geometry = Geometry(page_size=16)
    runner = make_runner(geometry)
    backend = known["torch_native"](runner)
    modes: list[str] = []
    build = attention_cpu.AttentionPlan

    def watched(*arguments: Any, mode: Any) -> Any:
        modes.append(mode)
        return build(*arguments, mode=mode)

    monkeypatch.setattr(attention_cpu, "AttentionPlan", watched)
    forwards = [
        (ForwardMode.EXTEND, Lanes(prefix=[0, 0], own=[40, 7])),
        (ForwardMode.EXTEND, Lanes(prefix=[100, 30], own=[9, 1])),
        (ForwardMode.DECODE, Lanes(prefix=[40, 7], own=[1, 1])),
        (ForwardMode.DECODE, Lanes(prefix=[41, 8], own=[1, 1])),
    ]
    for number, (mode, lanes) in enumerate(forwards, start=1):
        batch = make_batch(runner, place(runner, lanes, evicted_share=0.0), mode)
        qkv = random_qkv(geometry, sum(lanes.own))
        outs = []
        backend.init_forward_metadata(batch)
        for _ in range(2):
            run = backend.forward_decode if mode == ForwardMode.DECODE else backend.forward_extend
            outs.append(run(*qkv, make_layer(geometry), batch))
            runner.req_to_token_pool.req_to_token.zero_()
        assert len(modes) == number
        assert torch.equal(*outs)
    assert set(modes) == {"direct" if config is NATIVE else "live"}
