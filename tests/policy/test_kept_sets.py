"""Kept sets of the built-in policies against references written another way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.policy.matrix import make_view
from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy.eviction import choose_evicted
from vtoken_sglang.policy.registry import load_policy


def options_for(policy: str, **values: int | float) -> RequestOptions:
    return RequestOptions.resolve(VTokenConfig(policy=policy, **values), None)  # type: ignore[arg-type]


def run_to(logical_len: int, step: int, options: RequestOptions) -> set[int]:
    """Kept positions when the request grows by `step` tokens between evictions."""
    live: list[int] = []
    policy = load_policy(options.policy)
    for start in range(0, logical_len, step):
        end = min(start + step, logical_len)
        live += range(start, end)
        evicted = choose_evicted(
            policy,
            live_positions=np.array(live, dtype=np.int64),
            logical_len=end,
            options=options,
            eligible_below=end,
        )
        live = sorted(set(live) - set(evicted.tolist()))
    return set(live)


@pytest.mark.parametrize("step", [1, 7, 16, 200])
@pytest.mark.parametrize("sink", [0, 4])
def test_streaming_llm_keeps_sinks_and_a_window(step: int, sink: int) -> None:
    options = options_for("streaming_llm", budget=40, sink=sink, recent=8)
    kept = run_to(200, step, options)
    assert kept == {*range(sink), *range(200 - (40 - sink), 200)}


def splitmix64(seed: int, index: int) -> int:
    """The published generator in unbounded integers: output number `index` (from 1) of `seed`."""
    mask = 2**64 - 1
    state = (seed + index * 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_splitmix64_reference_is_the_published_generator() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567, index) for index in (1, 2, 3)] == published


@pytest.mark.parametrize("seed", [0, 1, 77, 2**63 - 1])
def test_random_scores_are_the_top_bits_of_splitmix64(seed: int) -> None:
    positions = [0, 1, 2, 63, 64, 5000, 131071]
    scores = load_policy("random").score(make_view(positions, 131072, seed))
    assert scores.tolist() == [float(splitmix64(seed, pos + 1) >> 40) for pos in positions]


@pytest.mark.parametrize("seed", [0, 3])
def test_random_kept_set_is_the_reference_one(seed: int) -> None:
    options = options_for("random", budget=60, sink=4, recent=16, seed=seed)
    kept = run_to(300, 300, options)
    order = sorted(range(4, 284), key=lambda pos: (splitmix64(seed, pos + 1) >> 40, pos))
    assert kept == {*range(4), *order[-40:], *range(284, 300)}


def test_random_score_of_a_position_depends_on_nothing_else() -> None:
    policy = load_policy("random")
    dense = policy.score(make_view(list(range(500)), 500, 9))
    sparse = policy.score(make_view([3, 77, 401], 900, 9))
    assert torch.equal(sparse, dense[[3, 77, 401]])
    assert not torch.equal(dense, policy.score(make_view(list(range(500)), 500, 10)))


def test_random_spreads_its_evictions() -> None:
    """The mean evicted position of 1024 of 4096 stays within 5 standard errors of the middle."""
    options = options_for("random", budget=3072, sink=0, recent=0)
    evicted = np.array(sorted(set(range(4096)) - run_to(4096, 4096, options)))
    standard_error = 4096 / np.sqrt(12 * len(evicted))
    assert abs(evicted.mean() - 2047.5) < 5 * standard_error
