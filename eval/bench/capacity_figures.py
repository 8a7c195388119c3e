"""How many requests one pool holds, and what that is worth: topic `capacity`.

    python -m vtoken_sglang_eval.bench.capacity_figures --out docs/results/capacity.json \
        --raw build/capacity_runs.jsonl --repeats 1

A part is one server: an arm, a workload, a pool. By estimate each takes 2 to 7 minutes on two idle
CPU cores, and a repeat of all 19 some 90 minutes. A part is one line of the raw file, written when
it is complete; parts that are there are skipped, so a measurement may be taken in pieces
(--max-parts, --parts) and is gone on with by calling again. Figures are written once every part of
a repeat is there.

Requests of a workload are all of one length and share nothing; keep is 0.3, the policy
streaming_llm unless named. Arms: native (nothing evicted), naive (evicted, nothing returned), skip
(the paper: shared pages untouched), auto (copy-on-write where it pays). Two frontiers are measured,
since on a CPU the time of a step grows with the number of requests in it:

  memory frontier   the most requests that ran at once while more were waiting and none was taken
                    back: what the pool holds. With retraction allowed: the same, where the server
                    reserves less for a request than it may generate.
  latency frontier  the largest level of a closed loop (1, 2, 4, ...) with no retraction and p95
                    per-token latency within 1.05 of level 1. Of the arm itself, in the same part.

  frontier_ratio_{workload}_{pool}
      memory frontier, auto / native
  {arm}_frontier_{workload}_{pool}, {arm}_frontier_retracting_{workload}_{pool}
      the memory frontier without and with retraction
  {arm}_latency_frontier_{workload}_{pool}
      the latency frontier
  sla_throughput_ratio_{policy}
      best throughput of a level whose p95 per-token latency is within 1.05 of the baseline,
      auto / native; the baseline is native at the most requests that it holds
  admitted_share
      requests that ran at once / what the pool could hold at the tokens that each held
      (prompt-heavy, large pool, auto; others with the workload and pool in the name)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.bench.capacity_parts import (
    CHUNK,
    KEEP,
    OUTPUT_POOLS,
    POOLS,
    SLA_POOL,
    SLA_SHAPE,
    SLACK,
    all_parts,
    measure,
    within,
)
from vtoken_sglang_eval.bench.capacity_runs import PAGE_SIZE, SHAPES, Load
from vtoken_sglang_eval.bench.raw_lines import read_lines
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.metrics import figure
from vtoken_sglang_eval.models import ensure_smollm2

MODULE = "vtoken_sglang_eval.bench.capacity_figures"
Figures = dict[str, dict[str, Any]]


# -- figures ----------------------------------------------------------------------------------


def latency_frontier(line: dict[str, Any]) -> int:
    """The largest level that keeps the latency of level 1, all smaller ones included."""
    first = line["levels"][0]["token_p95"]
    kept = 0
    for load in line["levels"]:
        if not within(load, first):
            break
        kept = load["level"]
    return kept


def sla_throughput(line: dict[str, Any], baseline: float) -> float:
    """Best throughput among levels within the latency; 0.0 when none is."""
    return max((x["throughput"] for x in line["levels"] if within(x, baseline)), default=0.0)


def memory_frontier(load: dict[str, Any]) -> int:
    """Requests that ran at once. Raises FiguresError when the burst was too small to tell."""
    if load["running_peak"] >= load["requests"]:
        raise FiguresError("figures: a burst was held whole; send more requests at once")
    return int(load["running_peak"])


def admitted_share(load: dict[str, Any], pool: int) -> float:
    """Raises FiguresError when no look fell into the time of the peak."""
    if load["held_each"] is None:
        raise FiguresError("figures: the requests were never seen pruned together")
    return float(load["running_peak"] * load["held_each"] / pool)


def figures_of(lines: Sequence[dict[str, Any]], repeats: Sequence[int]) -> Figures:
    """All figures. Ratios are taken within a repeat."""
    at = {(line["part"], line["repeat"]): line for line in lines}
    found: Figures = {}

    def add(name: str, unit: str, values: Sequence[float]) -> None:
        found[name] = figure(values, unit)

    frontier = [part for part in all_parts() if part.kind == "frontier"]
    for part in frontier:
        mine = [at[part.name, repeat] for repeat in repeats]
        tail = f"{part.shape.name}_{part.pool_name}"
        add(
            f"{part.arm}_frontier_{tail}",
            "requests at once, none taken back (memory)",
            [memory_frontier(line["burst"]) for line in mine],
        )
        add(
            f"{part.arm}_frontier_retracting_{tail}",
            "requests at once, retraction allowed (memory)",
            [line["retracting"]["running_peak"] for line in mine],
        )
        add(
            f"{part.arm}_retracted_{tail}",
            "requests taken back, retraction allowed",
            [line["retracting"]["retracted"] for line in mine],
        )
        add(
            f"{part.arm}_latency_frontier_{tail}",
            "level of a closed loop with p95 per token within 1.05 of level 1",
            [latency_frontier(line) for line in mine],
        )
        for metric, unit in (("throughput", "tokens/s"), ("retracted", "requests taken back")):
            add(f"{part.arm}_burst_{metric}_{tail}", unit, [x["burst"][metric] for x in mine])
        if part.arm == "native":
            native = [memory_frontier(line["burst"]) for line in mine]
        else:
            ratios = [memory_frontier(x["burst"]) / n for x, n in zip(mine, native, strict=True)]
            head = "frontier_ratio" if part.arm == "auto" else f"{part.arm}_frontier_ratio"
            add(f"{head}_{tail}", f"memory frontier, {part.arm} / native", ratios)
        if part.arm == "auto":
            shares = [admitted_share(line["burst"], part.pool) for line in mine]
            add(f"admitted_share_{tail}", "of what the pool could hold", shares)
    found["admitted_share"] = found[f"admitted_share_{SLA_SHAPE}_{SLA_POOL}"]
    for name, values in sla_ratios(at, repeats).items():
        add(name, f"throughput within {SLACK} of native's p95 per token, auto / native", values)
    return found


def sla_ratios(at: dict[tuple[str, int], dict[str, Any]], repeats: Sequence[int]) -> dict[str, Any]:
    """auto / native per policy and repeat."""
    parts = [part for part in all_parts() if part.kind == "sla"]
    (native,) = [part for part in parts if part.arm == "native"]
    found: dict[str, list[float]] = {}
    for repeat in repeats:
        base = at[native.name, repeat]
        (held,) = [x for x in base["levels"] if x["level"] == base["held_natively"]]
        reference = sla_throughput(base, held["token_p95"])
        for part in parts:
            if part is not native:
                ours = sla_throughput(at[part.name, repeat], held["token_p95"])
                ratio = ours / reference
                found.setdefault(f"sla_throughput_ratio_{part.policy}", []).append(ratio)
    return found


# -- the command ------------------------------------------------------------------------------


def complete_repeats(lines: Sequence[dict[str, Any]]) -> list[int]:
    """Repeats of which every part is there."""
    names = {part.name for part in all_parts()}
    seen: dict[int, set[str]] = {}
    for line in lines:
        seen.setdefault(line["repeat"], set()).add(line["part"])
    return sorted(repeat for repeat, parts in seen.items() if names <= parts)


def document_of(words: Sequence[str], model: str, seed: int, lines: Any, repeats: Any) -> Any:
    return {
        "topic": "capacity",
        **provenance.figures_head(MODULE, words),
        "settings": {
            "model": provenance.model_facts(model)["name"],
            "dtype": "float32",
            "page_size": PAGE_SIZE,
            "keep": KEEP,
            "chunked_prefill_size": CHUNK,
            "pools": {"prompt_heavy": POOLS, "output_heavy": OUTPUT_POOLS},
            "workloads": {x.name: [x.prompt, x.answer, x.burst] for x in SHAPES.values()},
            "seed": seed,
            "patch_series": provenance.patch_series_hash(),
        },
        "repeats": len(repeats),
        "figures": figures_of(lines, repeats),
    }


def say(name: str, load: dict[str, Any]) -> None:
    shown = Load(**load)
    print(
        f"  {name:10} level {shown.level:3} at once {shown.running_peak:3} "
        f"taken back {shown.retracted:2} p95 {shown.token_p95 * 1000:6.0f} ms "
        f"{shown.throughput:6.1f} tokens/s each {shown.held_each or 0:5.0f} "
        f"{shown.duration:5.1f} s",
        flush=True,
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="figures file, topic capacity")
    parser.add_argument("--raw", type=Path, required=True, help="parts measured, appended to")
    parser.add_argument("--repeats", type=int, default=1, help="repeats wanted in all")
    parser.add_argument("--max-parts", type=int, help="stop after measuring this many")
    parser.add_argument("--parts", default="", metavar="TEXT", help="only parts named like this")
    parser.add_argument("--list", action="store_true", help="show parts still to be measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--force", action="store_true", help="replace a larger measurement")
    chosen = parser.parse_args(words)
    arguments = sys.argv[1:] if words is None else list(words)
    model = chosen.model or str(ensure_smollm2())
    done = {(line["part"], line["repeat"]) for line in read_lines(chosen.raw)}
    wanted = [(part, repeat) for repeat in range(chosen.repeats) for part in all_parts()]
    todo = [(p, r) for p, r in wanted if (p.name, r) not in done and chosen.parts in p.name]
    chosen.raw.parent.mkdir(parents=True, exist_ok=True)
    for part, repeat in todo[: chosen.max_parts]:
        print(f"{part.name}, repeat {repeat}", flush=True)
        if chosen.list:
            continue
        line = measure(part, model, repeat, chosen.seed)
        with chosen.raw.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        for name in ("burst", "retracting"):
            if name in line:
                say(name, line[name])
        for load in line["levels"]:
            say("level", load)
    lines = read_lines(chosen.raw)
    repeats = complete_repeats(lines)
    if chosen.list or not repeats:
        print("figures: not written, no repeat is complete")
        return 0
    document = document_of(arguments, model, chosen.seed, lines, repeats)
    write_figures(chosen.out, document, chosen.force)
    for name, entry in document["figures"].items():
        print(f"{name:56} {entry['value']:.4g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
