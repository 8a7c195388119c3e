"""SGLang's own records, made through its own command line. Nothing is downloaded and no weights are
read: the model is a config.json in a temporary folder."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PLAIN_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Ask:
    """How a mode can be asked for on a machine without a GPU.

    Fields:
        flags: to append to a plain command line, in one line.
        model: entries to put over a plain Llama config.json.
        environ: environment variables to set.
        also: other rules that this asks for too, once SGLang has resolved it.
        stopped: without our refusal, SGLang itself rejects the flags on such a machine; the
            refusal then has to come before SGLang resolves its arguments.
    """

    flags: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    stopped: bool = False


Make = Callable[[Ask], Any]


@pytest.fixture(scope="session")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.fixture
def _environment() -> Iterator[None]:
    """Undo what SGLang writes into the environment while it resolves its arguments."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def make(parser: argparse.ArgumentParser, tmp_path: Path, _environment: None) -> Make:
    """Make an unresolved ServerArgs from an `Ask`."""
    from sglang.srt.server_args import ServerArgs

    def make(ask: Ask) -> Any:
        os.environ.update(ask.environ)
        (tmp_path / "config.json").write_text(json.dumps(PLAIN_MODEL | ask.model))
        plain = ["--model-path", str(tmp_path)]
        if "--device" not in ask.flags:
            plain += ["--device", "cpu"]
        namespace = parser.parse_args([*plain, *ask.flags.split()])
        namespace._radix_eviction_policy_explicitly_set = False
        return ServerArgs.from_cli_args(namespace)

    return make
