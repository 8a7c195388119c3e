"""Refusal by the objects that were really built: SGLang's own classes, small and on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.compat.conftest import Ask, Make
from vtoken_sglang.engine.compat.built import backend_hits, pool_hits, refuse_runtime, tree_hits
from vtoken_sglang.engine.compat.models import LAYER_RULES, layer_hits
from vtoken_sglang.engine.compat.rule import Hit, UnsupportedModesError
from vtoken_sglang.errors import HookError

pytest.importorskip("sglang.srt.server_args", reason="needs the supported SGLang")
torch = pytest.importorskip("torch")

SIZE, HEADS, HEAD_DIM, LAYERS = 64, 2, 4, 2


def _pool(page_size: int = 1, kind: str = "MHATokenToKVPool", dtype: Any = torch.float32) -> Any:
    from sglang.srt.mem_cache import memory_pool

    return getattr(memory_pool, kind)(
        SIZE,
        page_size=page_size,
        dtype=dtype,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def _allocator(pool: Any) -> Any:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    plain = {"dtype": pool.dtype, "device": "cpu", "kvcache": pool, "need_sort": False}
    if pool.page_size == 1:
        return TokenToKVPoolAllocator(SIZE, **plain)
    return PagedTokenToKVPoolAllocator(SIZE, page_size=pool.page_size, **plain)


def _rows() -> Any:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    return ReqToTokenPool(size=4, max_context_len=32, device="cpu", enable_memory_saver=False)


def _model() -> Any:
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = (RadixAttention(4, HEAD_DIM, 1.0, HEADS, layer_id=i) for i in range(LAYERS))
    return torch.nn.ModuleList(layers)


def _runner(page_size: int = 1) -> SimpleNamespace:
    pool = _pool(page_size)
    return SimpleNamespace(
        model=_model(),
        model_config=SimpleNamespace(model_path="some-model"),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=_allocator(pool),
        req_to_token_pool=_rows(),
        prefill_attention_backend_str="torch_native",
        decode_attention_backend_str="torch_native",
    )


def _judge(runner: Any) -> tuple[Hit, ...]:
    """A model runner whose model is loaded and whose pools are allocated."""
    return pool_hits(runner) + layer_hits(runner.model, runner.model_config.model_path)


def _names(hits: tuple[Any, ...]) -> list[str]:
    return [hit.rule for hit in hits]


@pytest.mark.parametrize("page_size", [1, 16])
def test_plain_runner_passes(page_size: int) -> None:
    runner = _runner(page_size)
    assert _judge(runner) + backend_hits(runner) == ()


def _subclass(found: Any) -> Any:
    """The same object under a subclass of its class, as an out-of-tree platform would give."""
    other = object.__new__(type("Other" + type(found).__name__, (type(found),), {}))
    other.__dict__.update(found.__dict__)
    return other


@pytest.mark.parametrize(
    ("attribute", "rule"),
    [
        ("token_to_kv_pool", "runtime-kv-pool"),
        ("token_to_kv_pool_allocator", "runtime-slot-allocator"),
        ("req_to_token_pool", "runtime-row-table"),
    ],
)
def test_a_subclass_is_not_plain(attribute: str, rule: str) -> None:
    runner = _runner()
    setattr(runner, attribute, _subclass(getattr(runner, attribute)))
    (hit,) = pool_hits(runner)
    assert hit.rule == rule
    assert " Other" in hit.flag
    assert hit.remedy.startswith("serve a text model")


def test_a_pool_of_another_kind_is_refused() -> None:
    runner = _runner(page_size=16)
    runner.token_to_kv_pool = _pool(16, "NoOpMHATokenToKVPool")
    assert _names(pool_hits(runner)) == ["runtime-kv-pool"]


def test_quantised_buffers_are_refused() -> None:
    runner = _runner()
    runner.token_to_kv_pool = _pool(dtype=torch.float8_e4m3fn)
    (hit,) = pool_hits(runner)
    assert hit.rule == "runtime-kv-buffers"
    assert "float8_e4m3fn" in hit.flag


def test_another_buffer_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    runner = _runner(page_size=16)
    (hit,) = pool_hits(runner)
    assert hit.rule == "runtime-kv-buffers"
    assert "layout hnd" in hit.flag


def _not_causal() -> Any:
    from sglang.srt.layers.radix_attention import AttentionType

    return AttentionType.ENCODER_ONLY


ODD_VALUES: dict[str, tuple[str, Callable[[], Any]]] = {
    "layer-window": ("sliding_window_size", lambda: 128),
    "layer-chunk": ("use_irope", lambda: True),
    "layer-logit-cap": ("logit_cap", lambda: 30.0),
    "layer-temperature": ("xai_temperature_len", lambda: 1024),
    "layer-positions": ("pos_encoding_mode", lambda: "ALIBI"),
    "layer-cross": ("is_cross_attention", lambda: True),
    "layer-type": ("attn_type", _not_causal),
}


@pytest.mark.parametrize("rule", LAYER_RULES, ids=lambda rule: rule.name)
def test_an_odd_layer_is_refused(rule: Any) -> None:
    runner = _runner()
    attribute, odd = ODD_VALUES[rule.name]
    setattr(runner.model[1], attribute, odd())
    (hit,) = _judge(runner)
    assert (hit.rule, hit.reason) == (rule.name, rule.reason)
    assert hit.flag.startswith("--model-path some-model (")
    assert f"layer 1 has {attribute}" in hit.flag


def test_a_model_without_attention_layers_is_refused() -> None:
    assert _names(layer_hits(torch.nn.Linear(2, 2), "some-model")) == ["layer-none"]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("fa3", "fa3"), ("torch_native", "triton"), ("triton", "trtllm_mha"), ("mamba2", "mamba2")],
)
def test_backends_are_judged_by_their_names(prefill: str, decode: str) -> None:
    runner = SimpleNamespace(
        prefill_attention_backend_str=prefill, decode_attention_backend_str=decode
    )
    (hit,) = backend_hits(runner)
    assert hit.flag == f"attention backend {prefill} for prefill, {decode} for decode"


def _unified_tree(**changes: Any) -> Any:
    """A UnifiedRadixCache of which only what is checked exists."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    tree = object.__new__(UnifiedRadixCache)
    plain = {
        "tree_components": (ComponentType.FULL,),
        "cache_controller": None,
        "linker": None,
    }
    for name, value in (plain | changes).items():
        setattr(tree, name, value)
    return tree


def test_prefix_caches() -> None:
    from sglang.srt.mem_cache.pure_swa_radix_cache import PureSWARadixCache
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    assert tree_hits(_unified_tree()) == ()
    assert tree_hits(object.__new__(RadixCache)) == ()
    assert _names(tree_hits(object.__new__(PureSWARadixCache))) == ["runtime-prefix-cache"]
    for change in (
        {"cache_controller": object()},
        {"linker": object()},
        {"tree_components": (ComponentType.FULL, ComponentType.SWA)},
    ):
        (hit,) = tree_hits(_unified_tree(**change))
        assert hit.rule == "runtime-tree"


@pytest.fixture
def server_args(make: Make) -> Any:
    """A resolved ServerArgs of a plain model, as a scheduler holds it."""
    made = make(Ask("--attention-backend torch_native"))
    made.resolve_once()
    return made


def _scheduler(server_args: Any, **changes: Any) -> SimpleNamespace:
    parts = {
        "server_args": server_args,
        "tp_worker": SimpleNamespace(model_runner=_runner()),
        "tree_cache": _unified_tree(),
    }
    return SimpleNamespace(**(parts | changes))


def test_plain_scheduler_passes(server_args: Any) -> None:
    refuse_runtime(_scheduler(server_args))


def test_every_part_of_a_scheduler_is_looked_at(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    scheduler = _scheduler(server_args, tree_cache=object())
    runner = scheduler.tp_worker.model_runner
    runner.req_to_token_pool = object()
    runner.model[0].logit_cap = 50.0
    runner.decode_attention_backend_str = "triton"
    declare_resolution(server_args, "test", pp_size=2)
    with pytest.raises(UnsupportedModesError) as caught:
        refuse_runtime(scheduler)
    assert _names(caught.value.hits) == [
        "pipeline-parallel",
        "runtime-row-table",
        "layer-logit-cap",
        "runtime-backend",
        "runtime-prefix-cache",
    ]
    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize(
    "attribute",
    [
        "token_to_kv_pool",
        "token_to_kv_pool_allocator",
        "req_to_token_pool",
        "model_config",
        "model",
    ],
)
def test_a_missing_attribute_is_an_error_not_a_pass(server_args: Any, attribute: str) -> None:
    scheduler = _scheduler(server_args)
    delattr(scheduler.tp_worker.model_runner, attribute)
    with pytest.raises(HookError, match=attribute):
        refuse_runtime(scheduler)
