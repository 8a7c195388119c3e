"""Storms whose pruning lags, step by step over SGLang's own allocator: requests wait, some are
retracted, all end; an allocation never fails."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.admission import waiting
from tests.helpers.fake_engine import MakeEngine
from tests.helpers.storm import CHUNK, Storm


def options_of(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.15:
        return {"policy": "none"}
    return {
        "policy": draw.choice(["random", "streaming_llm"]),
        "interval": draw.choice([1, 16, 48]),
        "shared": draw.choice(["skip", "mask"]),
        "publish": draw.choice(["prompt", "never", "never"]),
        **draw.choice([{"keep": 0.4}, {"budget": 48}]),
    }


def storm(engine: MakeEngine, seed: int, pages: int, **settings: Any) -> Storm:
    draw = random.Random(seed)
    sim = engine(16, pages, check=False, **settings)
    sim.scheduler.chunked_prefill_size = CHUNK
    queue = [
        waiting(sim, f"{n}", draw.randint(1, 180), draw.randint(1, 60), **options_of(draw))
        for n in range(24)
    ]
    found = Storm(sim, draw, queue)
    found.run()
    assert sim.allocator.available_size() + sim.runtime.orphaned_tokens() == sim.total
    return found


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_and_no_allocation_fails(engine: MakeEngine, seed: int) -> None:
    found = storm(engine, seed, pages=20)  # 320 tokens; the longest alone want 240
    assert found.peak >= 2


def test_reclaim_comes_before_retraction(engine: MakeEngine) -> None:
    """Admitted alike, with hardly anything reserved for what they generate; evictions come late."""
    counts = {}
    for shortage, ablation in (("relieve", ""), ("retract", ",retract")):
        sim = engine(16, 20, check=False, ablation="full-admission" + ablation)
        sim.scheduler.chunked_prefill_size = CHUNK
        late = {"publish": "never", "interval": 96}
        queue = [waiting(sim, f"{n}", 20, 120, **late) for n in range(10)]
        run = Storm(sim, random.Random(1), queue, ratio=0.05)
        run.run()
        counts[shortage] = (run.retracted, sim.runtime.statistics.early_evictions)
    assert counts["relieve"][0] < counts["retract"][0] / 2
    assert counts["relieve"][1] > 0
