"""Times of the engine-free core.

    python -m vtoken_sglang_eval.bench.core_bench --out core_bench.json [--parts copy]

Planner: CPU time of one safe point (new tokens, evictions, step) against the number of requests and
of pages they hold. "quiet" only evictions; "busy" also plans and commits a bounded repack in every
step.
Copy: bytes per second of `copy_slots` against a contiguous copy of the same bytes, alternating.
Nothing here needs a model.
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
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.provenance import figures_head
from vtoken_sglang_eval.results import figure

from vtoken_sglang.core.copy_engine import SyncCopyEngine
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.types import Generation, Int64Array, ReclaimSettings, Row, page_count
from vtoken_sglang.kernels.copy_slots import copy_slots

REQUESTS = (8, 64, 256)
PAGES = (1_000, 100_000, 1_000_000)
PAGE_SIZE = 16
EVICT_EVERY, EVICTIONS = 8, 8
STEPS, WARM_UP = 64, 16
BUSY_TOKENS = 1024
DECODE_STEP_MS = 20.0  # assumed, as of a small model on a GPU; nothing is decoded here
PARTS = ("planner", "copy")
Figures = dict[str, dict[str, Any]]


class CountingPool:
    """Page pool over an array used as a stack."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._stack = np.arange(pages, 0, -1, dtype=np.int64)
        self._free = pages

    def free_pages(self) -> int:
        return self._free

    def allocate(self, pages: int) -> Int64Array | None:
        if pages > self._free:
            return None
        self._free -= pages
        return self._stack[self._free : self._free + pages].copy()

    def release(self, pages: Int64Array) -> None:
        self._stack[self._free : self._free + len(pages)] = pages
        self._free += len(pages)


class Requests:
    """Rows that grow as the engine's do, driven in lockstep.

    Fields:
        length: positions of every row.
    """

    def __init__(
        self, count: int, *, page_size: int, length: int, grow: int, settings: ReclaimSettings
    ) -> None:
        self.page_size, self.length = page_size, length
        width = length + grow + page_size
        # Spare pages for destinations: a repack takes at most half of what it empties.
        self.pool = CountingPool(2 * count * page_count(width, page_size) + 64, page_size)
        self.table = torch.zeros(count + 1, width, dtype=torch.int32)
        self._host = self.table.numpy()
        self.reclaimer = Reclaimer(
            rows=RequestRows(self.table),
            buffers=[torch.zeros(1, 1, 1)],
            pool=self.pool,
            copier=SyncCopyEngine(lambda buffers, src, dst: None),
            settings=settings,
        )
        self.rows = [Row(row) for row in range(1, count + 1)]
        for row in self.rows:
            self._fill(row, 0, length)
            self.reclaimer.open(row, Generation(1), None, 0, length)

    def _fill(self, row: Row, start: int, end: int) -> None:
        size = self.page_size
        pages = self.pool.allocate(page_count(end - start, size))
        assert pages is not None
        slots = (pages[:, None] * size + np.arange(size)).ravel()
        self._host[row, start:end] = slots[: end - start]

    def append(self) -> None:
        """One token for every row, by the engine's rules."""
        pos, size = self.length, self.page_size
        if pos % size:
            self._host[1:, pos] = self._host[1:, pos - 1] + 1
        else:
            pages = self.pool.allocate(len(self.rows))
            assert pages is not None
            self._host[1:, pos] = pages * size
        self.length += 1

    @property
    def open_start(self) -> int:
        return (self.length - 1) // self.page_size * self.page_size

    def sealed(self) -> dict[Row, int]:
        return dict.fromkeys(self.rows, self.open_start)


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
    settings = {
        "page_size": PAGE_SIZE,
        "evictions": f"{EVICTIONS} tokens per request every {EVICT_EVERY} steps",
        "busy_tokens_per_step": BUSY_TOKENS,
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
