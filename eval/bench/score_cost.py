"""What one look costs a policy: milliseconds to score one request's live tokens.

    python -m vtoken_sglang_eval.bench.score_cost --out docs/results/policies.json

Keys of the model's shape are drawn and lie scattered in a pool; the policy gathers them, rotates
them back if it asks for that, and scores. Attention is drawn, too: what gathering it costs is
measured by `observation_cost`. One thread; its own CPU time, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.models import ensure_smollm2
from vtoken_sglang_eval.results import figure

from vtoken_sglang.engine.observe.rotary import KeyRotation
from vtoken_sglang.errors import VTokenError
from vtoken_sglang.policy.base import Keys, PolicyView
from vtoken_sglang.policy.names import BUILT_IN
from vtoken_sglang.policy.registry import load_policy

MODULE = "vtoken_sglang_eval.bench.score_cost"
PAGE_SIZE = 16
WINDOW = 16  # last tokens, which nobody observed


def make_keys(
    config: Any, tokens: int, draw: torch.Generator
) -> Callable[[Keys | None], Iterator[Tensor]]:
    """Which keys -> one float32 [tokens, kv_heads, dim] per layer, gathered when asked for."""
    head_dim = getattr(config, "head_dim", None)
    dim = head_dim or config.hidden_size // config.num_attention_heads
    shape = (2 * tokens, config.num_key_value_heads, dim)
    layers = [torch.randn(shape, generator=draw) for _ in range(config.num_hidden_layers)]
    slots, positions = torch.randperm(2 * tokens, generator=draw)[:tokens], torch.arange(tokens)
    angles = torch.outer(positions.float(), 1e4 ** -(torch.arange(dim // 2) / (dim // 2)))
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    module: Any = SimpleNamespace(cos_sin_cache=table, is_neox_style=True)
    rotation = KeyRotation([module] * len(layers))

    def keys(which: Keys | None) -> Iterator[Tensor]:
        gathered = (layer[slots] for layer in layers)
        return rotation.undo(gathered, positions) if which is Keys.BEFORE_ROTARY else gathered

    return keys


def score_seconds(name: str, view: PolicyView, repeats: int) -> list[float]:
    """Times of one policy over the same view; the first call, which warms up, is left out."""
    policy, times = load_policy(name), []
    for _ in range(1 + repeats):
        begun = time.thread_time()
        policy.score(view)
        times.append(time.thread_time() - begun)
    return times[1:]


def measure(config: Any, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """`score_ms_{policy}_tokens{n}` for every policy that ships."""
    figures: dict[str, Any] = {}
    for tokens in sizes:
        draw = torch.Generator().manual_seed(tokens)
        keys = make_keys(config, tokens, draw)
        for name in sorted(BUILT_IN):
            which = load_policy(name).reads_keys
            view = PolicyView(
                positions=torch.arange(tokens), logical_len=tokens, request_seed=0,
                attention=torch.rand(tokens, generator=draw), observed_len=tokens - WINDOW,
                layer_keys=partial(keys, which), page_size=PAGE_SIZE,
            )  # fmt: skip
            times = [1000 * seconds for seconds in score_seconds(name, view, repeats)]
            figures[f"score_ms_{name}_tokens{tokens}"] = figure(
                times, "ms of CPU time per look, one request"
            )
    return figures


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="figures file, topic policies")
    parser.add_argument("--repeats", type=int, default=9, help="looks timed per policy and size")
    parser.add_argument("--tokens", default="1024,4096", help="live tokens, separated by commas")
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--force", action="store_true", help="replace a larger measurement")
    chosen = parser.parse_args(words)
    arguments = sys.argv[1:] if words is None else list(words)
    model = chosen.model or str(ensure_smollm2())
    torch.set_num_threads(1)
    sizes = [int(size) for size in chosen.tokens.split(",")]
    figures = measure(AutoConfig.from_pretrained(model), sizes, chosen.repeats)
    settings = {"model": provenance.model_facts(model)["name"], "threads": 1}
    document = {
        "topic": "policies",
        **provenance.figures_head(MODULE, arguments),
        "settings": dict(settings),
        "repeats": chosen.repeats,
        "figures": figures,
    }
    try:
        write_figures(chosen.out, document, chosen.force)
    except VTokenError as error:
        print(error, file=sys.stderr)
        return 2
    for name, entry in sorted(figures.items()):
        print(f"{name:40} {entry['value']:9.2f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
