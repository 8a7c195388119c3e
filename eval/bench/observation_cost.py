"""What it costs to observe attention: decode steps and prompts, observed against not observed.

    python -m vtoken_sglang_eval.bench.observation_cost --out docs/results/policies.json

One server per setting of `--vtoken-observe-*`. Its requests come in pairs of equal batches: one
whose policy looks at attention (h2o) and one whose policy does not (streaming_llm), both with keep
1.0, so nothing dies and only the observation differs. A ratio is taken within a pair, the order
commits from pair to pair. A batch is sent twice: for one token with its prompts new to the server
(prompt time), then for many with its prompts cached (step time).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.metrics import figure
from vtoken_sglang_eval.models import ensure_smollm2
from vtoken_sglang_eval.policy_server import PolicyServer

from vtoken_sglang.errors import VTokenError

MODULE = "vtoken_sglang_eval.bench.observation_cost"
# Name in the figures -> flags of the server.
SETTINGS: dict[str, tuple[str, ...]] = {
    "all": ("--vtoken-observe-layers", "all"),
    "last": ("--vtoken-observe-layers", "last"),
    "every4": ("--vtoken-observe-layers", "every:4"),
    "all_queries4": ("--vtoken-observe-layers", "all", "--vtoken-observe-every", "4"),
}
OBSERVED, BASE = "h2o", "streaming_llm"
VOCABULARY = 40_000  # below the model's; token ids are drawn, so no two prompts share a prefix


def batch_seconds(
    server: PolicyServer, prompts: list[list[int]], tokens: int, policy: str
) -> float:
    """Wall time of a batch sent at once, `tokens` greedy tokens each."""
    options = {"policy": policy, "keep": 1.0, "reuse_prefix_scores": "off"}
    with ThreadPoolExecutor(len(prompts)) as pool:
        begun = time.perf_counter()
        list(pool.map(lambda prompt: server.generate(prompt, tokens, options), prompts))
        return time.perf_counter() - begun


def batch_times(server: PolicyServer, prompts: list[list[int]], tokens: int, policy: str) -> Any:
    """(seconds of the prompts, seconds per decode step) of one batch."""
    first = batch_seconds(server, prompts, 1, policy)
    cached = batch_seconds(server, prompts, 1, policy)
    many = batch_seconds(server, prompts, 1 + tokens, policy)
    return first, (many - cached) / tokens


def measure(server: PolicyServer, chosen: Any, draw: random.Random) -> dict[str, list[float]]:
    """Paired times, one entry per pair: `prompt` and `step`, with and without observation."""
    found: dict[str, list[float]] = {
        f"{part}_{policy}": [] for part in ("prompt", "step") for policy in (OBSERVED, BASE)
    }
    for pair in range(-1, chosen.repeats):  # the first pair warms up
        order = (OBSERVED, BASE) if pair % 2 else (BASE, OBSERVED)
        for policy in order:
            prompts = [
                [draw.randrange(1000, VOCABULARY) for _ in range(chosen.context)]
                for _ in range(chosen.batch)
            ]
            prompt_s, step_s = batch_times(server, prompts, chosen.tokens, policy)
            if pair >= 0:
                found[f"prompt_{policy}"].append(prompt_s)
                found[f"step_{policy}"].append(step_s)
    return found


def figures_of(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Cost as a ratio (1 = free) of one setting, and the times behind it."""
    figures: dict[str, Any] = {}
    for part, label in (("step", "observe_cost"), ("prompt", "observe_prompt_cost")):
        pairs = zip(times[f"{part}_{OBSERVED}"], times[f"{part}_{BASE}"], strict=True)
        ratios = [observed / base for observed, base in pairs]
        figures[f"{label}_{name}"] = figure(ratios, f"{part} time, observed / not observed")
    base = [1000 * seconds for seconds in times[f"step_{BASE}"]]
    figures[f"observe_base_step_ms_{name}"] = figure(base, "ms per decode step, not observed")
    return figures


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="figures file, topic policies")
    parser.add_argument("--repeats", type=int, default=8, help="pairs per setting")
    parser.add_argument("--context", type=int, default=768, help="prompt tokens")
    parser.add_argument("--batch", type=int, default=4, help="requests sent at once")
    parser.add_argument("--tokens", type=int, default=32, help="decode steps per batch")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="which, by name")
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="replace a larger measurement")
    chosen = parser.parse_args(words)
    arguments = sys.argv[1:] if words is None else list(words)
    names = chosen.settings.split(",")
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"--settings: unknown {', '.join(unknown)}; known: {', '.join(SETTINGS)}")
    model = chosen.model or str(ensure_smollm2())
    pool = 3 * chosen.batch * (chosen.context + chosen.tokens + 64)
    figures: dict[str, Any] = {}
    try:
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "server.log"
                flags, device = SETTINGS[name], chosen.device
                with PolicyServer(model, pool, log, *flags, device=device) as server:
                    times = measure(server, chosen, random.Random(chosen.seed))
            figures |= figures_of(name, times)
            for key, seconds in times.items():
                print(f"{name:14} {key:24} median {1000 * statistics.median(seconds):9.2f} ms")
        document = {
            "topic": "policies",
            **provenance.figures_head(MODULE, arguments, chosen.device),
            "settings": {
                "model": provenance.model_facts(model)["name"],
                "policy": OBSERVED,
                "base_policy": BASE,
                "context": chosen.context,
                "batch": chosen.batch,
                "decode_steps": chosen.tokens,
                "seed": chosen.seed,
                "patch_series": provenance.patch_series_hash(),
            },
            "repeats": chosen.repeats,
            "figures": figures,
        }
        write_figures(chosen.out, document, chosen.force)
    except VTokenError as error:
        print(error, file=sys.stderr)
        return 2
    for name, entry in sorted(figures.items()):
        spread = entry["spread"]
        print(f"{name:32} {entry['value']:.4f} [{spread['q1']:.4f}, {spread['q3']:.4f}]")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
