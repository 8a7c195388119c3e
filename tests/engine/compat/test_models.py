"""Models refused by their config, before any weight is read, and those that are let through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt.server_args", reason="needs the supported SGLang")

import transformers
from sglang.srt.server_args import ServerArgs

from tests.engine.compat.conftest import Ask, Make
from tests.engine.compat.test_arguments import refused
from vtoken_sglang.engine.compat.arguments import refuse_server_args, server_args_hits
from vtoken_sglang.engine.compat.models import MODEL_RULES, WINDOWS_IGNORED

_MLA = {
    "architectures": ["MiniCPM3ForCausalLM"],
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_SPARSE = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "sparse_attention_config": {"use_sparse_attention": True},
}
_LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"],
}
_MLLAMA = {"architectures": ["MllamaForConditionalGeneration"], "model_type": "mllama"}
_QWEN2_VL = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
_OWN_WINDOW = {
    "architectures": ["SomebodysForCausalLM"],
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"],
}

ASKS: Mapping[str, tuple[Ask, ...]] = {
    "mla": (Ask(model=_MLA, also=("asymmetric-kv",)),),
    "sparse-attention": (Ask(model=_SPARSE),),
    "recurrent": (
        Ask(model=_LFM2),
        Ask(model={"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}),
    ),
    "hybrid-window": (
        Ask(model={"is_hybrid_swa": True, "sliding_window": 32}),
        Ask(model={"attention_chunk_size": 64}),
    ),
    "window": (Ask(model=_OWN_WINDOW),),
    "logit-cap": (
        Ask(model={"attn_logit_softcapping": 50.0}),
        Ask(model={"architectures": ["Grok1ForCausalLM"]}),
    ),
    "attention-sinks": (Ask(model={"learnable_sink": True}),),
    "alibi": (Ask(model={"architectures": ["BaichuanForCausalLM"]}),),
    "asymmetric-kv": (Ask(model={"v_head_dim": 8}),),
    "encoder-decoder": (Ask(model=_MLLAMA, also=("multimodal",)),),
    "multimodal": (Ask(model=_QWEN2_VL),),
    "not-generating": (Ask(model={"architectures": ["LlamaForSequenceClassification"]}),),
}


def test_every_rule_has_a_name_of_its_own_and_a_way_to_ask() -> None:
    assert [rule.name for rule in MODEL_RULES] == list(ASKS)
    assert all(rule.reason and rule.remedy for rule in MODEL_RULES)


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        pytest.param(name, ask, id=f"{name}-{number}")
        for name, asks in ASKS.items()
        for number, ask in enumerate(asks)
    ],
)
def test_a_model_is_refused_by_its_config(make: Make, name: str, ask: Ask) -> None:
    server_args = make(ask)
    refuse_server_args(server_args)  # nothing is known of the model yet
    server_args.resolve_once()
    error = refused(server_args, name, ask)
    assert error.flag.startswith(f"--model-path {server_args.model_path} (")


# -- families, by the configs that transformers writes ---------------------------------------------

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}
Judge = Callable[..., set[str]]


@pytest.fixture
def judge(tmp_path: Path, _environment: None) -> Judge:
    """The rules that a family breaks when a server is started with it; there are no weights."""

    def judge(
        family: str, architecture: str = "", backend: str = "torch_native", **settings: Any
    ) -> set[str]:
        config = getattr(transformers, family + "Config")(**SMALL, **settings)
        config.architectures = [architecture or family + "ForCausalLM"]
        config.save_pretrained(tmp_path)
        assert not list(tmp_path.glob("*.safetensors"))
        made = ServerArgs(model_path=str(tmp_path), device="cpu", attention_backend=backend)
        made.resolve_once()
        return {hit.rule for hit in server_args_hits(made)}

    return judge


@pytest.mark.parametrize(
    ("family", "architecture", "rules"),
    [
        ("Gemma2", "", {"window", "logit-cap"}),
        ("Gemma3Text", "Gemma3ForCausalLM", {"window"}),
        ("Olmo3", "", {"window"}),
        ("Cohere2", "", {"window"}),
        ("Exaone4", "", {"window"}),
        ("Ministral", "", {"window"}),
        ("GptOss", "", {"window", "attention-sinks"}),
    ],
)
def test_windowed_families_are_refused_before_weights_are_read(
    judge: Judge, family: str, architecture: str, rules: set[str]
) -> None:
    found = judge(family, architecture, backend="triton")
    assert rules - {"window"} <= found
    assert found & {"window", "hybrid-window"}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Qwen2", {"sliding_window": 32, "use_sliding_window": False}),
        ("Qwen3", {"sliding_window": 32, "use_sliding_window": False}),
        ("Qwen2", {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 4}),
        ("Mistral", {"sliding_window": 32}),
        ("Mistral", {"sliding_window": None}),
        ("Olmo3", {"layer_types": ["full_attention"] * 8}),
        ("Llama", {}),
    ],
)
def test_a_window_that_is_named_and_not_used_is_no_reason(
    judge: Judge, family: str, settings: dict[str, Any]
) -> None:
    assert judge(family, **settings) == set()


def test_a_cap_on_the_last_logits_alone_is_no_reason(make: Make) -> None:
    server_args = make(Ask(model={"final_logit_softcapping": 30.0}))
    server_args.resolve_once()
    refuse_server_args(server_args)


@pytest.mark.parametrize("architecture", sorted(WINDOWS_IGNORED))
def test_sglang_reads_no_window_where_a_config_may_name_one(architecture: str) -> None:
    from sglang.srt import models

    folder = Path(models.__file__ or next(iter(models.__path__))).parent
    folder = folder if folder.name == "models" else folder / "models"
    named = [
        path for path in folder.glob("*.py") if f"class {architecture}(" in path.read_text("utf-8")
    ]
    assert named
    assert not [path for path in named if "sliding_window" in path.read_text("utf-8")]
