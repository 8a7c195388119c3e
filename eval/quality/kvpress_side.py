"""kvpress's side of the comparison: run with the interpreter of an environment that has kvpress.

Reads one JSON object on standard input, {"model", "items": [{"name", "context", "tail",
"scored_from"}], "presses": {name: class}, "ratio"}, and writes one JSON line per item:
{"name", "found": {name: {"surprise", "exact"}}, "versions"}. The name "none" is full attention.

Needs nothing of this project, so it is a script and not a module.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib.metadata import version
from typing import Any

import kvpress  # type: ignore[import-not-found, unused-ignore]
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DynamicCache

NEEDS_WEIGHTS = "ObservedAttentionPress"  # kvpress: it reads what eager attention returns


def make_press(name: str, ratio: float, seed: int) -> Any:
    """A press with kvpress's own defaults; one that draws does so from `seed`."""
    torch.manual_seed(seed)
    return getattr(kvpress, name)(compression_ratio=ratio)


def read(model: Any, press: Any, item: dict[str, Any], weights: bool) -> dict[str, Any]:
    """Prune once at the end of the context, then score the tail."""
    context = torch.tensor([item["context"]])
    tail = torch.tensor([item["tail"]])
    first = item["scored_from"]
    cache = DynamicCache()
    length = context.shape[1]
    with torch.inference_mode():
        with press(model) if press is not None else contextlib.nullcontext():
            model.model(input_ids=context, past_key_values=cache, output_attentions=weights)
        # Positions go on where the context ended, whatever the cache holds now.
        positions = torch.arange(length, length + tail.shape[1])[None]
        logits = model(input_ids=tail, past_key_values=cache, position_ids=positions).logits[0]
    expected = tail[0, first:]
    logits = logits[first - 1 : -1].float()
    return {
        "surprise": float(cross_entropy(logits, expected)),
        "exact": bool((logits.argmax(-1) == expected).all()),
        "kept": int(cache.get_seq_length()) - tail.shape[1],
    }


def main() -> int:
    asked = json.load(sys.stdin)
    os.environ["TQDM_DISABLE"] = "1"
    model: Any = AutoModelForCausalLM.from_pretrained(
        asked["model"], dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
    )
    model.eval()
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    for number, item in enumerate(asked["items"]):
        found = {}
        for name, kind in (("none", None), *asked["presses"].items()):
            press = None if kind is None else make_press(kind, asked["ratio"], number)
            weights = kind == NEEDS_WEIGHTS
            model.set_attn_implementation("eager" if weights else "sdpa")
            found[name] = read(model, press, item, weights)
        line = {"name": item["name"], "found": found, "versions": versions}
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
