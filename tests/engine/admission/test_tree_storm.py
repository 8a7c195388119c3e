"""Storms over a real tree: shared prefixes, every strategy, admission by expected footprint, forks,
eviction, relief and retraction together. All end, no allocation fails, and no page is lost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.admission import set_lengths
from tests.helpers.storm import CHUNK, TreeEngine, TreeStorm
from tests.helpers.tree_request import TreeRequest
from vtoken_sglang.options import VTokenConfig

POOL_TOKENS = 384
REQUESTS = 24
SEEDS = 6


@dataclass(frozen=True)
class Weather:
    """What the requests of a storm are like.

    Fields:
        shared, own, new: tokens of a prompt that others start with, too; of its own; to generate.
        intervals: tokens between two evictions. unpruned, outgrowing: shares of requests.
        ratios: as in `budget_of`.
    """

    shared: tuple[int, ...]
    own: tuple[int, int]
    new: tuple[int, int]
    intervals: tuple[int, ...]
    unpruned: float
    outgrowing: float
    ratios: tuple[float, ...]


WEATHERS = (
    Weather((0, 48, 96, 128), (1, 60), (1, 80), (1, 16, 48), 0.15, 0.0, (0.1, 0.5, 1.0)),
    Weather((0, 16, 48), (1, 30), (60, 180), (16, 96), 0.3, 0.0, (0.02,)),
    Weather((0, 48, 96), (100, 240), (20, 120), (16, 96), 0.2, 0.2, (0.02, 0.5)),
)


def options_of(draw: random.Random, weather: Weather) -> dict[str, Any]:
    if draw.random() < weather.unpruned:
        return {"policy": "none"}
    return {
        "policy": draw.choice(["random", "streaming_llm", "knorm"]),
        "interval": draw.choice(weather.intervals),
        "shared": draw.choice(["skip", "mask", "cow", "auto", "auto"]),
        "publish": draw.choice(["prompt", "prompt", "prompt", "never"]),
        "seed": draw.randint(1, 1000),
        **draw.choice([{"keep": 0.3}, {"keep": 0.5}, {"budget": 48}]),
    }


def arrival(sim: TreeEngine, draw: random.Random, weather: Weather, number: int) -> TreeRequest:
    """A request that often starts as others do, or asks for what another asked. Some become longer
    than the pool, if they are served at all."""
    shared, own = draw.choice(weather.shared), draw.randint(*weather.own)
    start = draw.randint(0, 2) * 1000
    first = draw.choice([0, number, number]) * 500 + 10_000
    prompt = [*range(start, start + shared), *range(first, first + own)]
    new = min(draw.randint(*weather.new), sim.total - 24 - len(prompt))  # as SGLang clips it
    options = options_of(draw, weather)
    request = sim.queue(f"r{number}", prompt, new, **options)
    pruned = sim.runtime.demand.options(request)
    if pruned is not None and draw.random() < weather.outgrowing:
        more = POOL_TOKENS + 40 - len(prompt)
        if sim.runtime.limits.serves(pruned, len(prompt), more):
            request = sim.queue(f"r{number}", prompt, more, **options)
    return request


def storm(patch: pytest.MonkeyPatch, seed: int, page_size: int) -> TreeStorm:
    draw = random.Random(seed)
    weather = WEATHERS[seed % len(WEATHERS)]
    config = VTokenConfig(
        policy="random",
        keep=0.5,
        sink=2,
        recent=8,
        ablation=draw.choice(["", "", "retract"]),
        check=True,
    )
    pages = POOL_TOKENS // page_size
    core = draw.choice(["rust", "python"])
    sim = TreeEngine(patch, config, page_size=page_size, pages=pages, core=core)
    promptness = draw.choice([0.05, 0.4])
    chunk = draw.choice([CHUNK, POOL_TOKENS])  # at most; or whole prompts
    set_lengths(sim, chunk)
    run = TreeStorm(sim, draw, [], draw.choice(weather.ratios), promptness, chunk=chunk)
    step = 0
    for number in range(REQUESTS):
        request = arrival(sim, draw, weather, number)
        run.coming.insert(0, (step, request))
        maximum = request.sampling_params.max_new_tokens
        run.lengths[request.rid] = draw.choice([maximum, draw.randint(1, maximum)])
        run.happened["longer than the pool"] += sim.runtime.demand.outgrows(request)
        step += draw.choice([0, 0, 0, 0, 2, 30])
    run.run()
    assert run.happened["ended"] == REQUESTS
    assert sim.tree.protected_size() == 0
    assert sim.allocator.available_size() + sim.tree.evictable_size() == sim.total
    if core == "python":
        assert not any(sim.lock_counts().values())
    counted = sim.runtime.statistics
    run.happened["forks"] += sim.runtime.forks.committed
    run.happened["admitted by pruning"] += counted.admitted_by_pruning
    run.happened["evicted from ahead of time"] += counted.early_evictions
    run.happened["relieved"] += counted.retractions_avoided
    run.happened["stalled"] += counted.stalled_chunks
    run.happened["retracted"] += run.retracted
    return run


WANTED = (
    "running at once",
    "forks",
    "forks at once",
    "ended during a copy",
    "cached prefixes",
    "chunks",
    "evicted",
    "longer than the pool",
    "admitted by pruning",
    "evicted from ahead of time",
    "relieved",
    "retracted",
    "resumed",
)


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_request_ends_and_no_allocation_fails(
    monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        with monkeypatch.context() as patch:
            happened += storm(patch, seed, page_size).happened
    assert all(happened[what] for what in WANTED), happened
