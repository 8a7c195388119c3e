"""Scores gathered forward by forward equal those of the full attention matrices: chunks, evictions,
moves, sampled layers and queries, requests side by side."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from vtoken_sglang_eval.policy_reference import SCORES

from tests.helpers.observed_request import OBSERVING, WINDOWED, Sim, SimState, policy_named
from vtoken_sglang.engine.observe.observer import ForwardLane, observed_layers
from vtoken_sglang.policy.registry import load_policy
from vtoken_sglang.policy.snapkv import SnapKV


def compare(sim: Sim, name: str, length: int, last_chunk: tuple[int, int]) -> None:
    options = WINDOWED[name][1] if name in WINDOWED else {}
    expected = SCORES[name](sim.reference(length, last_chunk), length, **options)
    got = sim.scores(length)
    assert got.keys() == {pos for pos in range(length) if pos not in sim.dead}
    errors = {pos: (value, float(expected[pos])) for pos, value in got.items()}
    wrong = {pos: pair for pos, pair in errors.items() if abs(pair[0] - pair[1]) > 2e-5}
    # A token that was not judged yet counts as the best live one; the reference's best may be dead.
    newest = {pos for pos in wrong if wrong[pos][0] == max(got.values())}
    best = max(float(expected[pos]) for pos in got)
    assert all(wrong[pos][1] >= best - 1e-6 for pos in newest)
    assert not wrong.keys() - newest


@pytest.mark.parametrize(("layers", "every"), [("all", 1), ("every:3", 4), ("last", 3)])
@pytest.mark.parametrize("name", OBSERVING)
@pytest.mark.parametrize("tapped", [False, True], ids=["by layer", "tapped"])
def test_chunks_evictions_and_moves(tapped: bool, name: str, layers: str, every: int) -> None:
    sim = Sim(policy_named(name), 130, 5, layers, every, tapped=tapped)
    for start, end in ((0, 37), (37, 60), (60, 90)):
        sim.forward(start, end, 90)
        sim.evict(end, 6)
        sim.move()
    for pos in range(90, 130):
        sim.forward(pos, pos + 1, 90)
        if pos % 6 == 5:
            compare(sim, name, pos + 1, (60, 90))
        if pos % 11 == 0:
            sim.evict(pos + 1, 4)
        if pos % 7 == 0:
            sim.move()


@pytest.mark.parametrize("name", ["knorm", "keydiff"])
def test_keys_are_read_where_they_are(name: str) -> None:
    sim = Sim(load_policy(name), 80, 6)
    sim.forward(0, 70, 70)
    sim.evict(70, 20)
    sim.move()
    for pos in range(70, 80):
        sim.forward(pos, pos + 1, 70)
        compare(sim, name, pos + 1, (0, 70))
    assert sim.state.watched is None


@pytest.mark.parametrize("name", ["knorm", "h2o"])
def test_keys_stored_as_bytes_are_read_as_what_they_are(name: str) -> None:
    plain = Sim(load_policy(name), 60, 4)
    stored = Sim(load_policy(name), 60, 4, key_dtype=torch.float8_e4m3fn)
    for sim in (plain, stored):
        sim.k = sim.k.to(torch.float8_e4m3fn).float()
        sim.forward(0, 60, 60)
    assert stored.observer._k_buffers[0].dtype == torch.uint8
    assert stored.scores(60) == plain.scores(60)


def test_snapkv_waits_for_the_end_of_the_prompt() -> None:
    policy = SnapKV(window=16, kernel=3)
    sim = Sim(policy, 100, 1)
    assert sim.observer.ready(sim.state)  # nothing of it was computed
    sim.forward(0, 50, 80)
    assert not sim.observer.ready(sim.state)
    sim.forward(50, 80, 80)
    assert sim.observer.ready(sim.state)
    sim.state.policy = load_policy("h2o")
    assert sim.observer.ready(sim.state)


def test_an_unobserved_request_scores_alike() -> None:
    sim = Sim(load_policy("h2o"), 40, 1, every=64)
    sim.forward(1, 40, 40)
    assert set(sim.scores(40).values()) == {0.0}


def test_a_policy_that_asks_for_nothing_costs_nothing() -> None:
    sim = Sim(load_policy("random"), 40, 1)
    lane = ForwardLane(sim.state, 0, 40, prompt_ends=True)
    assert sim.observer.prepare([lane], is_decode=False) is None


def test_a_row_that_ended_leaves_nothing_to_the_next() -> None:
    sim = Sim(load_policy("scissorhands"), 60, 2)
    sim.forward(0, 60, 60)
    assert sim.state.watched is not None
    taken = sim.state.watched.score_rows
    sim.observer.release(sim.state)
    sim.policy = load_policy("h2o")
    sim.state = SimState(sim)
    sim.forward(0, 60, 60)
    assert sim.state.watched is not None
    assert set(sim.state.watched.score_rows) <= set(taken)
    compare(sim, "h2o", 60, (0, 60))


def test_the_table_grows_with_the_requests() -> None:
    sim = Sim(load_policy("h2o"), 30, 3)
    sim.forward(0, 30, 30)
    before = sim.scores(30)
    states = [sim.state, *(SimState(sim) for _ in range(4))]
    for state in states[1:]:
        sim.observer.prepare([ForwardLane(state, 0, 1, prompt_ends=False)], is_decode=False)
    rows = [row for state in states if state.watched for row in state.watched.score_rows]
    assert len(rows) == 5
    assert sorted(rows) == sorted(set(rows))
    assert 0 not in rows
    assert sim.scores(30) == before


def test_a_request_without_a_free_score_row_stays_unobserved() -> None:
    """Where graphs hold the table it cannot grow; a request is not observed from the middle on."""
    sim = Sim(load_policy("h2o"), 30, 3, tapped=True)
    observer = sim.observer
    taken, observer._free = observer._free, []
    sim.forward(0, 20, 20)
    assert observer.unwatched == 1
    observer._free = taken
    sim.forward(20, 21, 20)
    assert observer.unwatched == 1
    assert set(sim.scores(21).values()) == {0.0}
    observer.release(sim.state)
    sim.state = SimState(sim)
    sim.forward(0, 20, 20)
    assert observer.unwatched == 1
    assert max(sim.scores(20).values()) > 0


def test_layers_are_counted_back_from_the_last() -> None:
    assert observed_layers("all", 3) == {0, 1, 2}
    assert observed_layers("last", 5) == {4}
    assert observed_layers("none", 5) == set()
    assert observed_layers("every:2", 5) == {4, 2, 0}
    assert observed_layers("every:4", 6) == {5, 1}
    assert observed_layers("every:99", 6) == {5}
