"""Times of the engine-free core, and what it leaves over in simulation.

    python -m vtoken_sglang_eval.bench.core_bench --out core_bench.json [--parts copy]

Planner: CPU time of one safe point (new tokens, evictions, step) against the number of requests and
of pages they hold. "quiet" only evictions; "busy" also plans and commits a bounded repack in every
step.
Copy: bytes per second of `copy_slots` against a contiguous copy of the same bytes, alternating.
Simulation: retained pages and waste of both arms (`core_simulation`). Nothing here needs a model.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vtoken_sglang_eval.bench.core_simulation import OUTPUT, POLICIES, PROMPT, Requests, simulate
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.metrics import figure
from vtoken_sglang_eval.provenance import figures_head

from vtoken_sglang.core.types import ReclaimSettings
from vtoken_sglang.kernels.copy_slots import copy_slots

REQUESTS = (8, 64, 256)
PAGES = (1_000, 100_000, 1_000_000)
PAGE_SIZE = 16
EVICT_EVERY, EVICTIONS = 8, 8
STEPS, WARM_UP = 64, 16
BUSY_TOKENS = 1024
DECODE_STEP_MS = 20.0  # assumed, as of a small model on a GPU; nothing is decoded here
KEEPS = (30, 50, 70)
PARTS = ("planner", "copy", "simulation")
Figures = dict[str, dict[str, Any]]


def planner_ms(
    count: int, pages: int, *, page_size: int, busy: bool, random: np.random.Generator
) -> float:
    """Median milliseconds of CPU time per safe point, all requests together."""
    length = max(pages // count, 4) * page_size
    settings = ReclaimSettings(
        threshold=0.25 if busy else 1.0, hysteresis=0.0, max_moved_tokens=BUSY_TOKENS
    )
    requests = Requests(
        count, page_size=page_size, length=length + 1, grow=STEPS + WARM_UP, settings=settings
    )
    core = requests.reclaimer
    if busy:
        # Waste to work on for every step to come; the evictions themselves are not timed.
        for row in requests.rows:
            core.evict_tokens(row, np.flatnonzero(random.random(length - page_size) < 0.4))
    taken = []
    for step in range(STEPS + WARM_UP):
        evictions = {
            row: np.sort(random.choice(length - page_size, EVICTIONS, replace=False))
            for row in requests.rows
            if (step + row) % EVICT_EVERY == 0
        }
        sealed = requests.sealed()
        start = time.thread_time()
        for row in requests.rows:
            core.sync_new_tokens(row, requests.length)
        for row, positions in evictions.items():
            core.evict_tokens(row, positions)
        core.step(sealed_upto=sealed)
        taken.append((time.thread_time() - start) * 1e3)
        requests.append()
    return float(np.median(taken[WARM_UP:]))


def planner_figures(repeats: int, random: np.random.Generator, quick: bool) -> Figures:
    found: Figures = {}
    for busy in (False, True):
        for count in REQUESTS:
            for pages in PAGES[:1] if quick else PAGES:
                times = [
                    planner_ms(count, pages, page_size=PAGE_SIZE, busy=busy, random=random)
                    for _ in range(repeats)
                ]
                kind = "busy" if busy else "quiet"
                found[f"planner_ms_{kind}_requests{count}_pages{pages}"] = figure(times, "ms")
    for page_size in (1, PAGE_SIZE):
        times = [
            planner_ms(32, 32 * 2048 // page_size, page_size=page_size, busy=False, random=random)
            for _ in range(repeats)
        ]
        name = "planner_step_share" if page_size == PAGE_SIZE else "planner_step_share_p1"
        shares = [taken / DECODE_STEP_MS for taken in times]
        found[name] = figure(
            shares, f"share of an assumed {DECODE_STEP_MS:.0f} ms step at 32 requests"
        )
    return found


def copy_seconds(work: Callable[[], None]) -> float:
    """CPU time of the one thread that copies: what else runs on the machine counts less."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def copy_figures(repeats: int, random: np.random.Generator, quick: bool) -> Figures:
    """Repack of 30 % live pages into one run, and into pages scattered over the pool."""
    layers, tokens = (2, 512) if quick else (16, 4096)
    slots = 8 * tokens
    buffers = [torch.rand(slots, 3, 64) for _ in range(2 * layers)]
    moved = tokens * 3 * 64 * 4 * len(buffers)
    src = torch.from_numpy(np.sort(random.choice(slots // 2, tokens, replace=False)))
    run = torch.arange(slots // 2, slots // 2 + tokens)
    pages = np.sort(random.choice(tokens // 4, tokens // PAGE_SIZE, replace=False)) * PAGE_SIZE
    scattered = torch.from_numpy(
        (slots // 2 + pages[:, None] + np.arange(PAGE_SIZE)).ravel().astype(np.int64)
    )

    def contiguous() -> None:
        for buffer in buffers:
            buffer[slots // 2 : slots // 2 + tokens].copy_(buffer[:tokens])

    found: Figures = {}
    for name, dst in (("copy_ratio", run), ("copy_ratio_scattered_pages", scattered)):
        ratios, rates = [], []
        for attempt in range(repeats + 1):
            plain = copy_seconds(contiguous)
            ours = copy_seconds(partial(copy_slots, buffers, src, dst))
            if attempt:  # the first round only warms up
                ratios.append(plain / ours)
                rates.append(moved / ours / 1e9)
        found[name] = figure(ratios, "share of a contiguous copy's bandwidth")
        found[name.replace("ratio", "rate")] = figure(rates, "GB/s of K/V moved")
    return found


def simulation_figures(repeats: int, seed: int, quick: bool) -> Figures:
    found: Figures = {}
    for page_size in (1, 16, 64):
        for policy in POLICIES:
            for keep in KEEPS[:1] if quick else KEEPS:
                arms = [
                    [
                        simulate(
                            policy,
                            keep=keep / 100,
                            page_size=page_size,
                            reclaim=reclaim,
                            count=1 if quick else 8,
                            seed=seed + repeat,
                        )
                        for reclaim in (False, True)
                    ]
                    for repeat in range(repeats)
                ]
                name = f"{policy}_keep{keep}_p{page_size}"
                ratios = [ours.retained / naive.retained for naive, ours in arms]
                found[f"sim_retained_ratio_{name}"] = figure(ratios, "reclaim / naive")
                found[f"sim_f_naive_{name}"] = figure([n.waste for n, _ in arms], "share")
                found[f"sim_f_{name}"] = figure([o.waste for _, o in arms], "share")
                found[f"sim_limit_gap_{name}"] = figure([o.limit_gap for _, o in arms], "share")
                after = [o.waste_after for _, o in arms if not np.isnan(o.waste_after)]
                if after:
                    found[f"sim_f_after_{name}"] = figure(after, "share")
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="figures file, topic core_bench")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="smallest sizes, to try it out")
    parser.add_argument("--force", action="store_true", help="replace a larger measurement")
    chosen = parser.parse_args(words)
    torch.set_num_threads(1)
    random = np.random.default_rng(chosen.seed)
    figures: Figures = {}
    if "planner" in chosen.parts:
        figures |= planner_figures(chosen.repeats, random, chosen.quick)
    if "copy" in chosen.parts:
        figures |= copy_figures(chosen.repeats, random, chosen.quick)
    if "simulation" in chosen.parts:
        figures |= simulation_figures(chosen.repeats, chosen.seed, chosen.quick)
    settings = {
        "page_size": PAGE_SIZE,
        "evictions": f"{EVICTIONS} tokens per request every {EVICT_EVERY} steps",
        "busy_tokens_per_step": BUSY_TOKENS,
        "prompt": PROMPT,
        "output": OUTPUT,
        "threshold": ReclaimSettings().threshold,
        "seed": chosen.seed,
        "quick": chosen.quick,
    }
    arguments = sys.argv[1:] if words is None else list(words)
    document = {
        "topic": "core_bench",
        **figures_head("vtoken_sglang_eval.bench.core_bench", arguments),
        "settings": settings,
        "repeats": chosen.repeats,
        "figures": figures,
    }
    write_figures(chosen.out, document, chosen.force)
    for name, found in figures.items():
        print(f"{name:55} {found['value']:.4g} {found['unit']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
