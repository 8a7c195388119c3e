"""Scores gathered forward by forward equal those of the full attention matrices: chunks, kills,
moves, sampled layers and queries, requests side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.policy_reference import SCORES, Observed
from tests.helpers.reference import visible_keys
from vtoken_sglang.engine.observation import Observer, observed_layers
from vtoken_sglang.engine.observation_tap import DecodeTap
from vtoken_sglang.policy.base import Policy, PolicyView
from vtoken_sglang.policy.registry import load_policy
from vtoken_sglang.policy.scissorhands import Scissorhands
from vtoken_sglang.policy.snapkv import SnapKV

LAYERS, Q_HEADS, KV_HEADS, DIM = 4, 6, 2, 8
SCALE = DIM**-0.5
WINDOWED: dict[str, tuple[Policy, dict[str, int]]] = {
    "scissorhands": (Scissorhands(window=20), {"window": 20}),
    "snapkv": (SnapKV(window=16, kernel=3), {"window": 16, "kernel": 3}),
}
OBSERVING = ["h2o", "tova", "snapkv", "scissorhands"]


class Sim:
    """One request whose tokens are computed forward by forward, at slots that may change."""

    def __init__(
        self,
        policy: Policy,
        length: int,
        seed: int,
        layers: str = "all",
        every: int = 1,
        *,
        tapped: bool = False,
    ) -> None:
        self.policy, self.length, self.every = policy, length, every
        draw = torch.Generator().manual_seed(seed)
        self.q = 2 * torch.randn(LAYERS, length, Q_HEADS, DIM, generator=draw)
        self.k = torch.randn(LAYERS, length, KV_HEADS, DIM, generator=draw)
        self.draw, self.row = draw, 3
        self.rows = torch.zeros(6, length + 7, dtype=torch.int32)
        self.buffers = [torch.full((4 * length, KV_HEADS, DIM), torch.nan) for _ in range(LAYERS)]
        self.kills: dict[int, list[int]] = {}
        self.dead: set[int] = set()
        self.tap: DecodeTap | None = None
        if tapped:
            observed = observed_layers(layers, LAYERS)
            self.tap = DecodeTap(self.rows, 4 * length, observed, score_bytes=1 << 20)
        self.observer = Observer(
            rows=self.rows,
            k_buffers=self.buffers,
            capacity=1,
            observe_layers=layers,
            observe_every=every,
            observation_of=lambda request: request.policy.observation(),
            live_positions=lambda row, end: self.live(end),
            live_len=lambda row, end: len(self.live(end)),
            tap=self.tap,
        )
        self.request: Any = SimpleNamespace(
            kv=SimpleNamespace(req_pool_idx=self.row, kv_committed_len=0),
            policy=policy,
            origin_input_ids=[],
            output_ids=[],
        )

    def live(self, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([pos for pos in range(end) if pos not in self.dead], np.int64)

    def place(self, pos: int) -> None:
        """Give a position a slot that nothing lives in, and write its keys there."""
        used = set(self.rows[self.row].tolist())
        while (slot := int(torch.randint(1, 4 * self.length, (1,), generator=self.draw))) in used:
            pass
        self.rows[self.row, pos] = slot
        for layer in range(LAYERS):
            self.buffers[layer][slot] = self.k[layer, pos]

    def forward(self, start: int, end: int, prompt_len: int) -> None:
        for pos in range(start, end):
            self.place(pos)
        self.request.kv.kv_committed_len = end
        self.request.origin_input_ids = range(prompt_len)
        decode = start >= prompt_len
        batch = SimpleNamespace(reqs=[self.request], prefix_lens=[start], extend_lens=[end - start])
        forward = self.observer.prepare(batch, decode, torch.tensor([self.row]))
        if forward is not None:
            for layer in range(LAYERS):
                self.observer.on_layer(forward, layer, self.q[layer, start:end], SCALE)
        elif decode and self.tap is not None and self.tap.active:
            for layer in sorted(self.tap.layers):
                q = self.q[layer, start:end]
                self.tap.on_layer(q, self.buffers[layer], self.lse(layer, start), SCALE)

    def lse(self, layer: int, pos: int) -> torch.Tensor:
        """What a decode kernel leaves: the log-sum-exp over the live keys, [1, q_heads]."""
        keys = self.k[layer, self.live(pos + 1)].repeat_interleave(Q_HEADS // KV_HEADS, dim=1)
        logits = torch.einsum("hd,khd->hk", self.q[layer, pos], keys) * SCALE
        return logits.logsumexp(dim=1)[None]

    def kill(self, length: int, count: int) -> None:
        """Kill `count` live positions below `length - 8`, as of this length."""
        live = [pos for pos in range(length - 8) if pos not in self.dead]
        order = torch.randperm(len(live), generator=self.draw)[:count].tolist()
        self.kills[length] = sorted(live[index] for index in order)
        self.dead.update(self.kills[length])
        self.rows[self.row, self.kills[length]] = 0

    def move(self) -> None:
        """Every live token moves; what was there before is overwritten."""
        live = (self.rows[self.row] != 0).nonzero().flatten().tolist()
        old = self.rows[self.row].clone()
        for pos in live:
            self.place(pos)
        stay = set(self.rows[self.row].tolist())
        for slot in set(old.tolist()) - stay:
            for buffer in self.buffers:
                buffer[slot] = torch.nan

    def scores(self, length: int) -> dict[int, float]:
        positions = torch.from_numpy(self.live(length))
        view = PolicyView(positions=positions, logical_len=length, request_seed=0)
        seen = self.observer.see(self.row, self.policy, view)
        return dict(zip(positions.tolist(), self.policy.score(seen).tolist(), strict=True))

    def reference(self, length: int, last_chunk: tuple[int, int], first_query: int = 0) -> Observed:
        visible = visible_keys(length, {q: k for q, k in self.kills.items() if q < length})
        keys = self.k[:, :length].repeat_interleave(Q_HEADS // KV_HEADS, dim=2)
        logits = torch.einsum("lqhd,lkhd->lhqk", self.q[:, :length].double(), keys.double())
        logits = (logits * SCALE).masked_fill(~visible, float("-inf"))
        layers = sorted(self.observer.layers)
        return Observed(
            weights=logits.softmax(dim=-1)[layers],
            visible=visible,
            keys=[self.k[layer, :length] for layer in range(LAYERS)],
            first_query=first_query,
            last_chunk=last_chunk,
            every=self.every,
        )


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


def policy_named(name: str) -> Policy:
    return WINDOWED[name][0] if name in WINDOWED else load_policy(name)


@pytest.mark.parametrize(("layers", "every"), [("all", 1), ("every:3", 1), ("last", 3), ("all", 4)])
@pytest.mark.parametrize("name", OBSERVING)
@pytest.mark.parametrize("tapped", [False, True], ids=["by layer", "tapped"])
def test_chunks_kills_and_moves(tapped: bool, name: str, layers: str, every: int) -> None:
    sim = Sim(policy_named(name), 130, 5, layers, every, tapped=tapped)
    for start, end in ((0, 37), (37, 60), (60, 90)):
        sim.forward(start, end, 90)
        sim.kill(end, 6)
        sim.move()
    for pos in range(90, 130):
        sim.forward(pos, pos + 1, 90)
        compare(sim, name, pos + 1, (60, 90))
        if pos % 11 == 0:
            sim.kill(pos + 1, 4)
        if pos % 7 == 0:
            sim.move()


@pytest.mark.parametrize("name", ["knorm", "keydiff"])
def test_keys_are_read_where_they_are(name: str) -> None:
    sim = Sim(load_policy(name), 80, 6)
    sim.forward(0, 70, 70)
    sim.kill(70, 20)
    sim.move()
    for pos in range(70, 80):
        sim.forward(pos, pos + 1, 70)
        compare(sim, name, pos + 1, (0, 70))
    assert not sim.observer._watched


def test_snapkv_waits_for_the_end_of_the_prompt() -> None:
    policy = SnapKV(window=16, kernel=3)
    sim = Sim(policy, 100, 1)
    assert sim.observer.ready(sim.row, policy)  # nothing of it was computed
    sim.forward(0, 50, 80)
    assert not sim.observer.ready(sim.row, policy)
    sim.forward(50, 80, 80)
    assert sim.observer.ready(sim.row, policy)
    assert sim.observer.ready(sim.row, load_policy("h2o"))


def test_an_unobserved_request_scores_alike() -> None:
    sim = Sim(load_policy("h2o"), 40, 1, every=64)
    sim.forward(1, 40, 40)
    assert set(sim.scores(40).values()) == {0.0}


def test_a_policy_that_asks_for_nothing_costs_nothing() -> None:
    sim = Sim(load_policy("random"), 40, 1)
    batch = SimpleNamespace(reqs=[sim.request], prefix_lens=[0], extend_lens=[40])
    assert sim.observer.prepare(batch, is_decode=False) is None


def test_a_row_that_ended_leaves_nothing_to_the_next() -> None:
    sim = Sim(load_policy("scissorhands"), 60, 2)
    sim.forward(0, 60, 60)
    taken = sim.observer._watched[sim.row].score_rows
    sim.observer.forget(sim.row)
    sim.observer.forget(sim.row)
    sim.policy = sim.request.policy = load_policy("h2o")
    sim.forward(0, 60, 60)
    assert set(sim.observer._watched[sim.row].score_rows) <= set(taken)
    compare(sim, "h2o", 60, (0, 60))


def test_the_table_grows_with_the_requests() -> None:
    sim = Sim(load_policy("h2o"), 30, 3)
    sim.forward(0, 30, 30)
    before = sim.scores(30)
    for row in (1, 2, 4, 5):
        other = SimpleNamespace(**{**vars(sim.request), "kv": SimpleNamespace(req_pool_idx=row)})
        assert sim.observer._watch(other, 0) is not None
    rows = [row for watched in sim.observer._watched.values() for row in watched.score_rows]
    assert sorted(rows) == sorted(set(rows))
    assert 0 not in rows
    assert sim.scores(30) == before


def test_layers_are_counted_back_from_the_last() -> None:
    assert observed_layers("all", 3) == {0, 1, 2}
    assert observed_layers("last", 5) == {4}
    assert observed_layers("every:2", 5) == {4, 2, 0}
    assert observed_layers("every:4", 6) == {5, 1}
    assert observed_layers("every:99", 6) == {5}
