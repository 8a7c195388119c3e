"""Models that are refused: by their config before any weight is read, and by their layers after.

A config can name a sliding window that the served model never uses, and a model can use one that
its config does not name. So windows, caps and the like are judged by the built layers, where they
are exact; the config rules only stop early what is certain from the config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vtoken_sglang.engine.compat.rule import Ask, Hit, ModelRule, required

PLAIN_MODEL = "serve a text model whose layers all use plain multi-head or grouped-query attention"


def _mla(config: Any) -> str | None:
    from sglang.srt.configs.model_config import AttentionArch

    arch = required(config, "attention_arch")
    return "latent attention" if arch == AttentionArch.MLA else None


def _sparse(config: Any) -> str | None:
    from sglang.srt.configs import model_config as known

    hf_config = required(config, "hf_config")
    tests = ("is_deepseek_dsa", "is_deepseek_v4", "is_minimax_sparse")
    return next((name[3:] for name in tests if required(known, name)(hf_config)), None)


def _recurrent(config: Any) -> str | None:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    found = mambaish_config(config)
    return None if found is None else type(found).__name__


def _hybrid_window(config: Any) -> str | None:
    if required(config, "is_hybrid_swa"):
        return "sliding-window layers in a pool of their own"
    chunk = required(config, "attention_chunk_size")
    return None if chunk is None else f"attention_chunk_size {chunk}"


def _alibi(config: Any) -> str | None:
    # SGLang sets this attribute only while it reads a Baichuan config.
    return "ALiBi" if getattr(config, "use_alibi", False) else None


def _asymmetric(config: Any) -> str | None:
    if not required(config, "has_asymmetric_kv"):
        return None
    return f"head_dim {config.head_dim}, v_head_dim {config.v_head_dim}"


def _flagged(name: str, wanted: bool = True) -> Callable[[Any], str | None]:
    return lambda config: name if bool(required(config, name)) is wanted else None


_MLA_CONFIG = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

MODEL_RULES: tuple[ModelRule, ...] = (
    ModelRule(
        name="mla",
        kind="multi-head latent attention (MLA)",
        find=_mla,
        reason="its KV pool has one latent row per token, not keys and values",
        remedy=PLAIN_MODEL,
        asks=(Ask(model=_MLA_CONFIG, also=("asymmetric-kv",)),),
    ),
    ModelRule(
        name="sparse-attention",
        kind="built-in sparse attention (DSA, DeepSeek V4, MiniMax M3)",
        find=_sparse,
        reason="its index caches name slots that would move under them",
        remedy=PLAIN_MODEL,
        asks=(
            Ask(
                model={
                    "architectures": ["MiniMaxM3SparseForCausalLM"],
                    "sparse_attention_config": {"use_sparse_attention": True},
                }
            ),
        ),
    ),
    ModelRule(
        name="recurrent",
        kind="Mamba, linear attention and hybrids of them",
        find=_recurrent,
        reason="a recurrent state cannot forget single tokens",
        remedy=PLAIN_MODEL,
        asks=(
            Ask(
                model={
                    "architectures": ["Lfm2ForCausalLM"],
                    "model_type": "lfm2",
                    "layer_types": ["conv", "full_attention"],
                }
            ),
            Ask(model={"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}),
        ),
    ),
    ModelRule(
        name="hybrid-window",
        kind="hybrid sliding-window or chunked attention",
        find=_hybrid_window,
        reason="window layers have a pool of their own and SGLang frees it by position",
        remedy=PLAIN_MODEL,
        asks=(
            Ask(model={"is_hybrid_swa": True, "sliding_window": 32}),
            Ask(model={"attention_chunk_size": 64}),
        ),
    ),
    ModelRule(
        name="attention-sinks",
        kind="learned attention sinks",
        find=_flagged("has_attention_sinks"),
        reason="the sink term is not part of our attention backends",
        remedy=PLAIN_MODEL,
        asks=(Ask(model={"learnable_sink": True}),),
    ),
    ModelRule(
        name="alibi",
        kind="ALiBi positions",
        find=_alibi,
        reason="its bias counts row entries, which pruning changes",
        remedy="serve a model with rotary positions",
        asks=(Ask(model={"architectures": ["BaichuanForCausalLM"]}),),
    ),
    ModelRule(
        name="asymmetric-kv",
        kind="keys and values of different width",
        find=_asymmetric,
        reason="copies and kernels are tested on equal widths only",
        remedy=PLAIN_MODEL,
        asks=(Ask(model={"v_head_dim": 8}),),
    ),
    ModelRule(
        name="encoder-decoder",
        kind="encoder-decoder",
        find=_flagged("is_encoder_decoder"),
        reason="rows also hold encoder tokens, which have no position of their own",
        remedy="serve a decoder-only text model",
        asks=(
            Ask(
                model={"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama"},
                also=("multimodal",),
            ),
        ),
    ),
    ModelRule(
        name="multimodal",
        kind="multimodal",
        find=_flagged("is_multimodal"),
        reason="policies have not been tested on image and audio tokens",
        remedy="serve a text model, or add --language-model-only where SGLang offers it",
        asks=(
            Ask(
                model={
                    "architectures": ["Qwen2VLForConditionalGeneration"],
                    "model_type": "qwen2_vl",
                }
            ),
        ),
    ),
    ModelRule(
        name="not-generating",
        kind="embedding, reward or classification",
        find=_flagged("is_generation", wanted=False),
        reason="nothing is decoded, so there is nothing to prune",
        remedy="serve it without --vtoken-policy",
        asks=(Ask(model={"architectures": ["LlamaForSequenceClassification"]}),),
    ),
)
"""Kinds of model that SGLang's ModelConfig alone gives away."""


def model_hits(config: Any) -> tuple[Hit, ...]:
    """Every `MODEL_RULES` entry that applies to SGLang's `ModelConfig`."""
    hits = []
    for rule in MODEL_RULES:
        found = rule.find(config)
        if found is not None:
            flag = f"--model-path {required(config, 'model_path')} ({rule.kind}: {found})"
            hits.append(Hit(rule=rule.name, flag=flag, reason=rule.reason, remedy=rule.remedy))
    return tuple(hits)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRule:
    """Something an attention layer must not have.

    Fields:
        name, kind, reason: as in `ModelRule`; the remedy is `PLAIN_MODEL`.
        attribute: the attribute of SGLang's RadixAttention that is read.
        plain: whether its value is the plain one.
    """

    name: str
    kind: str
    attribute: str
    plain: Callable[[Any], bool]
    reason: str


LAYER_RULES: tuple[LayerRule, ...] = (
    LayerRule(
        name="layer-window",
        kind="sliding-window attention",
        attribute="sliding_window_size",
        plain=lambda value: value == -1,
        reason="a window over live tokens is not a window over positions",
    ),
    LayerRule(
        name="layer-chunk",
        kind="chunked local attention",
        attribute="use_irope",
        plain=lambda value: value is False,
        reason="a chunk of live tokens is not a chunk of positions",
    ),
    LayerRule(
        name="layer-logit-cap",
        kind="capped attention logits",
        attribute="logit_cap",
        plain=lambda value: value == 0,
        reason="the cap is not part of all our attention backends",
    ),
    LayerRule(
        name="layer-temperature",
        kind="attention temperature by length",
        attribute="xai_temperature_len",
        plain=lambda value: value <= 0,
        reason="the temperature would follow the live length, not the position",
    ),
    LayerRule(
        name="layer-positions",
        kind="positions added inside attention",
        attribute="pos_encoding_mode",
        plain=lambda value: value == "NONE",
        reason="they would count live tokens, not positions",
    ),
    LayerRule(
        name="layer-cross",
        kind="cross attention",
        attribute="is_cross_attention",
        plain=lambda value: value is False,
        reason="rows also hold encoder tokens, which have no position of their own",
    ),
    LayerRule(
        name="layer-type",
        kind="attention that is not causal",
        attribute="attn_type",
        plain=lambda value: value.value == "decoder",
        reason="the order of live tokens alone does not give its mask",
    ),
)
"""What the built attention layers are checked for."""


def layer_hits(model: Any, model_path: str) -> tuple[Hit, ...]:
    """Every `LAYER_RULES` entry broken by a RadixAttention of `model`, at its first layer.

    A model without one is refused as well: nothing would read through the slot map.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    if not layers:
        return (
            Hit(
                rule="layer-none",
                flag=f"--model-path {model_path} ({type(model).__name__})",
                reason="it has no attention layer that SGLang's backends serve",
                remedy=PLAIN_MODEL,
            ),
        )
    return tuple(_broken(layers, model_path))


def _broken(layers: list[Any], model_path: str) -> Iterator[Hit]:
    for rule in LAYER_RULES:
        for layer in layers:
            value = required(layer, rule.attribute)
            if not rule.plain(value):
                what = f"{rule.kind}: layer {layer.layer_id} has {rule.attribute} {value}"
                flag = f"--model-path {model_path} ({what})"
                yield Hit(rule=rule.name, flag=flag, reason=rule.reason, remedy=PLAIN_MODEL)
                break
