"""Keys rotated back are those that went into rotary embedding: SGLang's own modules, and a plain
transformers model whose keys were caught before. What cannot be rotated back is refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from vtoken_sglang_eval.eager_attention import EagerReference

from tests.helpers.on_device import on_device
from vtoken_sglang.core.device_work import WorkAtOnce
from vtoken_sglang.engine.observe.rotary import KeyRotation, key_rotation
from vtoken_sglang.engine.runtime.observation import make_observer
from vtoken_sglang.errors import UnsupportedModeError
from vtoken_sglang.options import VTokenConfig
from vtoken_sglang.policy.base import Policy, PolicyError
from vtoken_sglang.policy.eviction import EvictionPlan, lowest, score_tokens
from vtoken_sglang.policy.keydiff import KeyDiff
from vtoken_sglang.policy.registry import load_policy

DIM, KV_HEADS, LONGEST = 16, 2, 256
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "neighbours": {"is_neox_style": False},
    "partial": {"partial_rotary_factor": 0.5},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "yarn": {"rope_scaling": YARN},
    "yarn with mscale": {
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "attn_factor": 1.3}
    },
    "half precision": {"dtype": torch.bfloat16},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * (DIM // 2),
    "long_factor": [2.0] * (DIM // 2),
    "original_max_position_embeddings": 64,
}


def rope(**options: Any) -> Any:
    return get_rope(
        DIM, DIM, LONGEST, 10000, **{"is_neox_style": True, "dtype": torch.float32, **options}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_sglangs_own_rotation_is_undone(kind: str) -> None:
    module = rope(**KINDS[kind])
    positions = torch.tensor([0, 1, 5, 63, 64, 200, 255])
    keys = torch.randn(len(positions), KV_HEADS, DIM, generator=torch.Generator().manual_seed(1))
    _, cached = module.forward_native(positions, keys.clone(), keys.clone())
    assert not torch.allclose(cached[1:], keys[1:], atol=0.1)
    (back,) = KeyRotation([module]).undo([cached], positions)
    torch.testing.assert_close(back, keys, rtol=0, atol=1e-5)


def config_of(kind: type, **options: Any) -> Any:
    return kind(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=KV_HEADS, head_dim=DIM,
        max_position_embeddings=LONGEST, attn_implementation="eager", **options,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["plain", "llama3", "yarn", "norm before rotary"])
def test_keys_equal_those_that_transformers_rotates(family: str) -> None:
    scaling = {"llama3": LLAMA3, "yarn": YARN}.get(family)
    options = {} if scaling is None else {"rope_scaling": {**scaling, "rope_theta": 10000.0}}
    torch.manual_seed(5)
    if family == "norm before rotary":
        model: Any = Qwen3ForCausalLM(config_of(Qwen3Config, rope_theta=10000.0))
    else:
        model = LlamaForCausalLM(config_of(LlamaConfig, **options))
    seen = EagerReference(model.float()).observe(
        list(range(90)), {}, first_query=0, last_chunk=(0, 90)
    )
    rotation = KeyRotation([rope(rope_scaling=scaling)] * 3)
    assert not torch.allclose(seen.keys[0], seen.plain_keys[0], atol=0.01)
    for back, keys in zip(rotation.undo(seen.keys, torch.arange(90)), seen.plain_keys, strict=True):
        torch.testing.assert_close(back, keys, rtol=0, atol=1e-5)


def test_nothing_is_read_back() -> None:
    keys, positions = on_device(torch.randn(4, KV_HEADS, DIM)), on_device(torch.arange(4))
    module = rope()
    table = on_device(module.cos_sin_cache)
    stand_in: Any = torch.nn.Module()
    stand_in.cos_sin_cache, stand_in.is_neox_style = table, True
    (back,) = KeyRotation([stand_in]).undo([keys], positions)
    assert back.shape == keys.shape


class Attention(torch.nn.Module):
    """An attention module of one layer, as SGLang's models lay them out."""

    def __init__(self, layer: int, **children: Any) -> None:
        super().__init__()
        self.attn = RadixAttention(4, DIM, 1.0, KV_HEADS, layer_id=layer)
        for name, child in children.items():
            setattr(self, name, child)


class HunYuanAttention(Attention):
    """A name that is known to normalise keys after it rotated them."""


def model_of(*layers: Attention) -> torch.nn.Module:
    return torch.nn.ModuleList(layers)


def test_layers_are_found_whatever_their_order_and_may_have_no_rotary() -> None:
    plain, other = rope(), rope(is_neox_style=False)
    model = model_of(
        Attention(2, rotary_emb=other),
        Attention(0, rotary_emb=plain),
        Attention(1, rotary_emb=None),
    )
    rotation = key_rotation(model, 3)
    keys = [torch.randn(5, KV_HEADS, DIM) for _ in range(3)]
    positions = torch.arange(5)
    cached = [
        plain.forward_native(positions, keys[0].clone(), keys[0].clone())[1],
        keys[1],
        other.forward_native(positions, keys[2].clone(), keys[2].clone())[1],
    ]
    for back, expected in zip(rotation.undo(cached, positions), keys, strict=True):
        torch.testing.assert_close(back, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (lambda: model_of(Attention(0, rotary_emb=rope(rope_scaling=LONGROPE))), "Phi3LongRoPE"),
        (
            lambda: model_of(
                Attention(0, rotary_emb=rope(
                    rope_scaling={"rope_type": "default", "mrope_section": [2, 3, 3]}))
            ),
            "MRotaryEmbedding",
        ),
        (lambda: model_of(Attention(0, a=rope(), b=rope(is_neox_style=False))), "has 2 rotary"),
        (lambda: model_of(Attention(0)), "has 0 rotary"),
        (lambda: model_of(HunYuanAttention(0, rotary_emb=rope())), "normalises keys after"),
        (lambda: model_of(), "0 attention modules store keys for 1 layers"),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_rotated_back_are_refused_by_name(model: Any, problem: str) -> None:
    with pytest.raises(UnsupportedModeError, match="cannot be rotated back") as caught:
        key_rotation(model(), 1)
    assert problem in str(caught.value)


def observer_of(policy: str) -> Any:
    """The observer of a server with this policy whose model cannot rotate keys back."""
    pool = SimpleNamespace(k_buffer=[torch.zeros(8, KV_HEADS, DIM)])
    model = model_of(Attention(0, rotary_emb=rope(rope_scaling=LONGROPE)))
    scheduler: Any = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(4, 8, dtype=torch.int32)),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=1, get_kvcache=lambda: pool),
    )
    return make_observer(scheduler, VTokenConfig(policy=policy, keep=0.5), WorkAtOnce())


@pytest.mark.parametrize("policy", ["keydiff", "keydiff_local", "keydiff_snapkv"])
def test_a_server_whose_policy_needs_such_keys_does_not_start(policy: str) -> None:
    with pytest.raises(UnsupportedModeError, match="Phi3LongRoPE"):
        observer_of(policy)


def test_elsewhere_a_request_that_needs_them_ends_with_the_reason() -> None:
    observer = observer_of("knorm")
    for policy in (load_policy("knorm"), KeyDiff(rotary=True)):
        assert choose(policy, observer).numel() == 2
    with pytest.raises(PolicyError, match="Phi3LongRoPE"):
        choose(load_policy("keydiff"), observer)


def choose(policy: Policy, observer: Any) -> torch.Tensor:
    plan = EvictionPlan(np.arange(5), logical_len=5, seed=0, first=0, last=5, count=1)
    view = observer.see(SimpleNamespace(row=1, watched=None), policy, plan.view())
    return lowest(score_tokens(policy, view, plan), plan)
