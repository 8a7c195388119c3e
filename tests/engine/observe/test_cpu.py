"""What the CPU backend shows in extend, decode and mixed forwards: plain attention's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.engine.attention.test_cpu import (
    DIM,
    KV_HEADS,
    LAYERS,
    Q_HEADS,
    fill_pool,
    make_batch,
    make_layer,
    make_runner,
    random_qkv,
    run,
)
from tests.helpers.observed_request import RowState
from vtoken_sglang.engine.attention.cpu import VTokenTorchAttnBackend
from vtoken_sglang.engine.observe import forward_link as observation_link
from vtoken_sglang.engine.observe.forward_link import LayerObserver
from vtoken_sglang.engine.observe.observer import ForwardLane, Observer
from vtoken_sglang.policy.base import Gather, Observation, Policy, PolicyView

FORWARDS = [
    (ForwardMode.DECODE, [3, 70, 150], [1, 1, 1]),
    (ForwardMode.EXTEND, [0, 30, 100], [40, 1, 17]),
    (ForwardMode.MIXED, [64, 20, 99], [30, 1, 1]),
]
WATCHED = (0, 2)


class Plan:
    """Stands for a forward's plan."""


class Asks(Policy):
    """Looks at attention as it is told to."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def observation(self) -> Observation:
        return self._observation

    def score(self, view: PolicyView) -> torch.Tensor:
        raise AssertionError("nobody asks")


@pytest.mark.parametrize("layers", ["all", "last"])
@pytest.mark.parametrize("gather", [Gather.TOTAL, Gather.BELOW_UNIFORM])
@pytest.mark.parametrize(("mode", "prefix", "own"), FORWARDS)
def test_scores_are_plain_attentions(
    monkeypatch: pytest.MonkeyPatch,
    mode: ForwardMode,
    prefix: list[int],
    own: list[int],
    gather: Gather,
    layers: str,
) -> None:
    runner: Any = make_runner()
    fill_pool(runner)
    batch: Any = make_batch(runner, mode, prefix, own)
    rows = runner.req_to_token_pool.req_to_token
    dead = {0: [1], 1: [4, 5], 2: list(range(10, 60))}
    for lane, positions in dead.items():
        rows[lane + 1, [pos for pos in positions if pos < prefix[lane]]] = 0
    observer = Observer(
        rows=rows,
        k_buffers=runner.token_to_kv_pool.k_buffer,
        capacity=8,
        observe_layers=layers,
        observe_every=1,
    )
    lanes = [
        ForwardLane(
            RowState(rows, lane + 1, Asks(Observation(gather, 1000)) if lane in WATCHED else None),
            before,
            before + count,
            prompt_ends=True,
        )
        for lane, (before, count) in enumerate(zip(prefix, own, strict=True))
    ]
    forward = observer.prepare(lanes, mode == ForwardMode.DECODE)
    assert forward is not None
    batch.kv_loc_plan = Plan()
    observed = {batch.kv_loc_plan: LayerObserver(observer, forward)}
    monkeypatch.setattr(observation_link, "_observed", observed)
    backend = VTokenTorchAttnBackend(runner, "live")
    queries = []
    for layer_id in range(LAYERS):
        qkv = random_qkv(sum(own), torch.float32)
        run(backend, batch, make_layer(layer_id), qkv)
        queries.append(qkv[0].view(-1, Q_HEADS, DIM).double())
    for lane in WATCHED:
        watched = lanes[lane].state.watched
        assert watched is not None
        got = observer.scores[list(watched.score_rows)].sum(dim=0)
        wanted = expected(runner, queries, lane, prefix, own, observer.layers, gather)
        torch.testing.assert_close(got[: len(wanted)].double(), wanted, atol=1e-4, rtol=1e-4)
        assert not bool(got[len(wanted) :].any())
    assert lanes[1].state.watched is None


def expected(
    runner: Any,
    queries: list[torch.Tensor],
    lane: int,
    prefix: list[int],
    own: list[int],
    layers: frozenset[int],
    gather: Gather,
) -> torch.Tensor:
    """float64 [span]: weights, or how many are below an equal share, over queries and heads."""
    first, span = sum(own[:lane]), prefix[lane] + own[lane]
    slots = runner.req_to_token_pool.req_to_token[lane + 1, :span].long()
    total = torch.zeros(span, dtype=torch.float64)
    for layer in layers:
        keys = runner.token_to_kv_pool.get_key_buffer(layer)[slots].double()
        keys = keys.repeat_interleave(Q_HEADS // KV_HEADS, dim=1)
        for index in range(own[lane]):
            seen = (slots != 0) & (torch.arange(span) <= prefix[lane] + index)
            logits = torch.einsum("hd,khd->hk", queries[layer][first + index], keys) * DIM**-0.5
            weights = logits.masked_fill(~seen, -torch.inf).softmax(dim=1)
            if gather is Gather.BELOW_UNIFORM:
                weights = ((weights < 1 / int(seen.sum())) & seen).double()
            total += weights.sum(dim=0)
    return total
