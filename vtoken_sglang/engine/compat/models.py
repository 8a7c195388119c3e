"""Models that are refused: by their config before any weight is read, and by their layers after.

A config can name a sliding window that the served model never uses, and a model can use one that
its config does not name. So the config rules stop early what is certain from the config, and the
built layers, where windows, caps and the like are exact, are the second line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from vtoken_sglang.engine.compat.rule import Condition, Hit, Rule, required
from vtoken_sglang.errors import shortened

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from torch import nn

PLAIN_MODEL = "serve a text model whose layers all use plain multi-head or grouped-query attention"
WINDOWS: Final = frozenset({"sliding_attention", "chunked_attention"})
WINDOWS_IGNORED: Final = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM",
     "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}
)  # fmt: skip
"""Architectures that SGLang serves with full attention, whatever windows their config names."""


def model_hits(config: ModelConfig) -> tuple[Hit, ...]:
    """Every `MODEL_RULES` entry that applies. HookError when SGLang lacks what a rule reads."""
    spell = _spelled(required(config, "model_path"))
    return tuple(hit for rule in MODEL_RULES if (hit := rule.hit(config, spell)))


def layer_hits(model: nn.Module, model_path: str) -> tuple[Hit, ...]:
    """Every `LAYER_RULES` entry broken by a RadixAttention of `model`, at its first layer.

    A model without one is refused as well: nothing would read through the slot map.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    spell = _spelled(model_path)
    layers = [module for module in model.modules() if isinstance(module, RadixAttention)]
    if not layers:
        reason = "it has no attention layer that SGLang's backends serve"
        return (Hit("layer-none", spell(type(model).__name__), reason, PLAIN_MODEL),)
    broken = ([rule.hit(layer, spell) for layer in layers] for rule in LAYER_RULES)
    return tuple(hits[0] for found in broken if (hits := [hit for hit in found if hit]))


def _spelled(model_path: str) -> Callable[[str], str]:
    return lambda found: f"--model-path {shortened(model_path)} ({found})"


# -- what a config gives away ---------------------------------------------------------------------


def _mla(config: ModelConfig) -> str | None:
    from sglang.srt.configs.model_config import AttentionArch

    latent = required(config, "attention_arch") == AttentionArch.MLA
    return "multi-head latent attention (MLA)" if latent else None


def _sparse(config: ModelConfig) -> str | None:
    from sglang.srt.configs import model_config as known

    tests = ("is_deepseek_dsa", "is_deepseek_v4", "is_minimax_sparse")
    found = [name for name in tests if required(known, name)(required(config, "hf_config"))]
    return f"built-in sparse attention: {found[0][3:]}" if found else None


def _recurrent(config: ModelConfig) -> str | None:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    found = mambaish_config(config)
    return None if found is None else f"Mamba or linear attention: {type(found).__name__}"


def _hybrid_window(config: ModelConfig) -> str | None:
    if required(config, "is_hybrid_swa"):
        return "sliding-window layers in a pool of their own"
    chunk = required(config, "attention_chunk_size")
    return None if chunk is None else f"chunked attention: attention_chunk_size {chunk}"


def _window(config: ModelConfig) -> str | None:
    window, names = required(config, "sliding_window_size"), _architectures(config)
    types = getattr(required(config, "hf_text_config"), "layer_types", None) or ()
    if window is None or not WINDOWS & set(types) or names & WINDOWS_IGNORED:
        return None
    # Those with a pool of their own are named by the rule above.
    return None if required(config, "is_hybrid_swa") else f"sliding-window attention: {window}"


def _logit_cap(config: ModelConfig) -> str | None:
    grok = any(name.startswith("Grok1") for name in _architectures(config))  # SGLang's default: 30
    text = required(config, "hf_text_config")
    cap = getattr(text, "attn_logit_softcapping", 30.0 if grok else None)
    return f"capped attention logits: attn_logit_softcapping {cap}" if cap else None


def _architectures(config: ModelConfig) -> set[str]:
    return set(required(required(config, "hf_config"), "architectures") or ())


def _alibi(config: ModelConfig) -> str | None:
    # SGLang sets this attribute only while it reads a Baichuan config.
    return "ALiBi positions" if getattr(config, "use_alibi", False) else None


def _asymmetric(config: ModelConfig) -> str | None:
    widths = f"keys of width {config.head_dim}, values of {config.v_head_dim}"
    return widths if required(config, "has_asymmetric_kv") else None


def _is(attribute: str, kind: str, refused: bool = True) -> Condition:
    return lambda config: kind if bool(required(config, attribute)) is refused else None


_NO_POSITION = "rows also hold encoder tokens, which have no position of their own"

MODEL_RULES: Final = (
    Rule("mla", _mla, "its KV pool has one latent row per token, not keys and values", PLAIN_MODEL),
    Rule("sparse-attention", _sparse,
         "its index caches name slots that would move under them", PLAIN_MODEL),
    Rule("recurrent", _recurrent, "a recurrent state cannot forget single tokens", PLAIN_MODEL),
    Rule("hybrid-window", _hybrid_window,
         "window layers have a pool of their own and SGLang frees it by position", PLAIN_MODEL),
    Rule("window", _window,
         "a window over live tokens is not a window over positions", PLAIN_MODEL),
    Rule("logit-cap", _logit_cap,
         "the cap is not part of all our attention backends", PLAIN_MODEL),
    Rule("attention-sinks", _is("has_attention_sinks", "learned attention sinks"),
         "the sink term is not part of our attention backends", PLAIN_MODEL),
    Rule("alibi", _alibi, "its bias counts row entries, which pruning changes",
         "serve a model with rotary positions"),
    Rule("asymmetric-kv", _asymmetric,
         "copies and kernels are tested on equal widths only", PLAIN_MODEL),
    Rule("encoder-decoder", _is("is_encoder_decoder", "encoder-decoder"), _NO_POSITION,
         "serve a decoder-only text model"),
    Rule("multimodal", _is("is_multimodal", "multimodal"),
         "policies have not been tested on image and audio tokens",
         "serve a text model, or add --language-model-only where SGLang offers it"),
    Rule("not-generating",
         _is("is_generation", "embedding, reward or classification", refused=False),
         "nothing is decoded, so there is nothing to prune", "serve it without --vtoken-policy"),
)  # fmt: skip
"""Kinds of model that SGLang's ModelConfig alone gives away."""


# -- what a built layer gives away ----------------------------------------------------------------


def _layer(attribute: str, kind: str, plain: Callable[[Any], bool]) -> Condition:
    def when(layer: Any) -> str | None:
        value = required(layer, attribute)
        told = f"{kind}: layer {layer.layer_id} has {attribute} {value}"
        return None if plain(value) else told

    return when


LAYER_RULES: Final = (
    Rule("layer-window",
         _layer("sliding_window_size", "sliding-window attention", lambda value: value == -1),
         "a window over live tokens is not a window over positions", PLAIN_MODEL),
    Rule("layer-chunk",
         _layer("use_irope", "chunked local attention", lambda value: value is False),
         "a chunk of live tokens is not a chunk of positions", PLAIN_MODEL),
    Rule("layer-logit-cap",
         _layer("logit_cap", "capped attention logits", lambda value: value == 0),
         "the cap is not part of all our attention backends", PLAIN_MODEL),
    Rule("layer-temperature",
         _layer("xai_temperature_len", "attention temperature by length", lambda value: value <= 0),
         "the temperature would follow the live length, not the position", PLAIN_MODEL),
    Rule("layer-positions",
         _layer("pos_encoding_mode", "positions added inside attention",
                lambda value: value == "NONE"),
         "they would count live tokens, not positions", PLAIN_MODEL),
    Rule("layer-cross",
         _layer("is_cross_attention", "cross attention", lambda value: value is False),
         _NO_POSITION, PLAIN_MODEL),
    Rule("layer-type",
         _layer("attn_type", "attention that is not causal",
                lambda value: value.value == "decoder"),
         "the order of live tokens alone does not give its mask", PLAIN_MODEL),
)  # fmt: skip
"""What the built attention layers are checked for."""
