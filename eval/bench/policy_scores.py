"""Whether the served engine evicts what each policy says, against the plain model in transformers.

    python -m vtoken_sglang_eval.bench.policy_scores --out docs/results/policies.json

Real multi-turn conversations, one request at a time, each policy in turn. Every eviction of the
trace is checked: the plain model, in float32 with eager attention and the same tokens masked, must
name the same evicted (`eval/policy_reference.py`, written apart from the policies). Figures:

  score_mismatches    evictions that it does not account for, beyond a tie in float32
  score_swapped       share of the evicted that a tie let differ
  max_policy_lines    lines of the longest policy file
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.chat import ModelTokenizer
from vtoken_sglang_eval.eager_attention import EagerReference, expected_evicted, unexplained
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.metrics import figure
from vtoken_sglang_eval.models import ensure_smollm2
from vtoken_sglang_eval.policy_reference import SCORES
from vtoken_sglang_eval.policy_server import PAGE_SIZE, PolicyServer
from vtoken_sglang_eval.quality.text import conversation_text
from vtoken_sglang_eval.sharegpt import find_dataset, load_dataset

from vtoken_sglang.errors import VTokenError
from vtoken_sglang.policy.names import BUILT_IN

MODULE = "vtoken_sglang_eval.bench.policy_scores"
KEEP, SINK, RECENT, INTERVAL = 0.5, 4, 32, 16
CHUNK = 128
ANSWER = 48
# What float32 may move: sums of weights by rounding; counts by a few of the (head, layer) pairs
# whose weight is all but the equal share.
TIE = 2e-5
COUNTED_TIE = 3


@dataclass(slots=True)
class Found:
    """What came of one policy's evictions."""

    evictions: int = 0
    evicted: int = 0
    swapped: int = 0
    mismatches: int = 0


def read_evictions(trace: Path) -> dict[str, list[tuple[int, list[int]]]]:
    """(logical length, evicted positions) of each eviction, by request."""
    found: dict[str, list[tuple[int, list[int]]]] = {}
    for line in trace.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found.setdefault(record["rid"], []).append((record["logical_len"], record["evicted"]))
    return found


def check(
    reference: EagerReference,
    policy: str,
    prompt: Sequence[int],
    answer: Any,
    evictions: Sequence[tuple[int, list[int]]],
    found: Found,
) -> None:
    """Add one request's evictions to `found`; prints what the plain model does not account for."""
    cached = int(answer["meta_info"]["cached_tokens"])
    ids = [*prompt, *answer["output_ids"]]
    seen = reference.observe(
        ids,
        {length: evicted for length, evicted in evictions if length < len(ids)},
        first_query=cached,
        last_chunk=(cached + (len(prompt) - cached - 1) // CHUNK * CHUNK, len(prompt)),
    )
    layers, heads = seen.weights.shape[:2]
    tie = COUNTED_TIE / (layers * heads) if policy == "scissorhands" else TIE
    dead: set[int] = set()
    for length, evicted in evictions:
        choice = expected_evicted(
            SCORES[policy](seen, length),
            [pos for pos in range(length) if pos not in dead],
            length=length,
            kept=math.ceil(round(KEEP * length, 6)),
            sink=SINK,
            recent=RECENT,
            page_size=PAGE_SIZE,
        )
        lines = unexplained(choice, evicted, tie)
        for line in lines:
            print(f"{policy} at {length}: {line}", flush=True)
        found.evictions += 1
        found.evicted += len(evicted)
        found.swapped += len(set(evicted) - set(choice.evicted))
        found.mismatches += bool(lines)
        dead.update(evicted)


def measure(model: str, prompts: Sequence[Sequence[int]]) -> dict[str, Found]:
    """Serve every prompt under every policy, then check all evictions; by policy."""
    options = {"keep": KEEP, "sink": SINK, "recent": RECENT, "interval": INTERVAL}
    answers: dict[str, Any] = {}
    names = {
        f"{policy} {index}": (policy, prompt)
        for policy in SCORES
        for index, prompt in enumerate(prompts)
    }
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        flags = ("--disable-radix-cache", "--chunked-prefill-size", str(CHUNK))
        flags += ("--vtoken-trace", str(trace))
        with PolicyServer(model, 4096, Path(folder) / "server.log", *flags) as server:
            for name, (policy, prompt) in names.items():
                chosen = {**options, "policy": policy}
                answers[name] = server.generate(prompt, ANSWER, chosen, name)
        evictions = read_evictions(trace)
    reference = EagerReference.load(Path(model))
    found = {policy: Found() for policy in SCORES}
    for name, (policy, prompt) in names.items():
        check(reference, policy, prompt, answers[name], evictions.get(name, []), found[policy])
    return found


def figures_of(found: dict[str, Found]) -> dict[str, Any]:
    """Figures over all policies, and per policy. Raises FiguresError: one evicted nothing."""
    if idle := [policy for policy, each in found.items() if not each.evictions]:
        raise FiguresError(f"nothing was evicted under {', '.join(idle)}, so nothing was checked")
    total = sum(each.evictions for each in found.values())
    wrong = sum(each.mismatches for each in found.values())
    lines = max(map(policy_lines, BUILT_IN.values()))
    figures = {
        "max_policy_lines": figure([lines], "lines"),
        "score_mismatches": figure([wrong], f"evictions of {total} unlike the plain model's"),
    }
    for policy, each in found.items():
        unit = f"evictions of {each.evictions} unlike the plain model's"
        figures[f"score_mismatches_{policy}"] = figure([each.mismatches], unit)
        share = each.swapped / max(1, each.evicted)
        figures[f"score_swapped_{policy}"] = figure([share], f"share of {each.evicted} evicted")
    return figures


def policy_lines(target: str) -> int:
    """Lines of the file of a policy named `module:Class`."""
    module = importlib.import_module(target.partition(":")[0])
    return len(Path(str(module.__file__)).read_text(encoding="utf-8").splitlines())


def make_prompts(model: str, path: str | None, count: int, length: int) -> list[list[int]]:
    """The first conversations that are long enough, cut to lengths from `length` on."""
    tokenizer, prompts = ModelTokenizer(model), []
    for conversation in load_dataset(find_dataset(path)).conversations:
        tokens = tokenizer.encode(conversation_text(conversation, tokenizer))
        size = length + 13 * len(prompts)
        if len(tokens) >= size:
            prompts.append(tokens[:size])
        if len(prompts) == count:
            break
    return prompts


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="figures file, topic policies")
    parser.add_argument("--prompts", type=int, default=6, help="conversations per policy")
    parser.add_argument("--length", type=int, default=280, help="tokens of the shortest prompt")
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", help="ShareGPT-format JSON file")
    parser.add_argument("--force", action="store_true", help="replace a larger measurement")
    chosen = parser.parse_args(words)
    arguments = sys.argv[1:] if words is None else list(words)
    try:
        model = chosen.model or str(ensure_smollm2())
        prompts = make_prompts(model, chosen.dataset, chosen.prompts, chosen.length)
        figures = figures_of(measure(model, prompts))
        document = {
            "topic": "policies",
            **provenance.figures_head(MODULE, arguments),
            "settings": {
                "model": provenance.model_facts(model)["name"],
                "requests": len(prompts),
                "prompt_tokens": chosen.length,
                "answer_tokens": ANSWER,
                "keep": KEEP,
                "sink": SINK,
                "recent": RECENT,
                "interval": INTERVAL,
                "patch_series": provenance.patch_series_hash(),
            },
            "repeats": 1,
            "figures": figures,
        }
        write_figures(chosen.out, document, chosen.force)
    except VTokenError as error:
        print(error, file=sys.stderr)
        return 2
    for name, entry in sorted(figures.items()):
        print(f"{name:32} {entry['value']:.4g} {entry['unit']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
