"""Ranks in lockstep: equal evictions from split heads, and a stop at the first difference.

Two processes over gloo; SGLang's group coordinator is stood in for.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.processes import free_port
from vtoken_sglang.core.device_work import WorkAtOnce
from vtoken_sglang.core.types import Generation, Row
from vtoken_sglang.engine.request_state import RequestState
from vtoken_sglang.engine.runtime.eviction_pass import Asked, EvictionPass, Outcome
from vtoken_sglang.engine.runtime.ranks import Ranks, first_difference
from vtoken_sglang.errors import HookError, InvariantError
from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy.base import Policy, PolicyView
from vtoken_sglang.policy.eviction import plan_eviction
from vtoken_sglang.policy.registry import load_policy

HEADS, LENGTH = 4, 200
OPTIONS = RequestOptions.resolve(VTokenConfig(policy="knorm", keep=0.4, sink=2, recent=10), None)


class FailsOn(Policy):
    reads_keys = True

    def __init__(self, rank: int) -> None:
        self.fails = rank == 1

    def score(self, view: PolicyView) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("on this rank alone")
        return torch.zeros(len(view.positions))


class Keys:
    """An observer whose keys are the ones given."""

    def __init__(self, layers: list[torch.Tensor]) -> None:
        self.layers = layers

    def see(self, _state: RequestState, _policy: Policy, view: PolicyView) -> PolicyView:
        return PolicyView(
            positions=view.positions,
            logical_len=view.logical_len,
            request_seed=0,
            layer_keys=lambda: iter(self.layers),
        )


def all_keys() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(LENGTH, HEADS, 8, generator=draw) for _ in range(3)]


def select(policies: list[Policy], keys: list[torch.Tensor], ranks: Ranks) -> list[Outcome]:
    """One pass of one request for each policy."""
    observer: Any = Keys(keys)
    passes = EvictionPass(observer, WorkAtOnce(), torch.device("cpu"), 1, ranks)
    asked = []
    for number, policy in enumerate(policies):
        state = RequestState(
            request=SimpleNamespace(),
            record=SimpleNamespace(),
            row=Row(number + 1),
            generation=Generation(1),
            options=OPTIONS,
            policy=policy,
        )
        positions = np.arange(LENGTH, dtype=np.int64)
        plan = plan_eviction(positions, logical_len=LENGTH, options=OPTIONS, eligible_below=192)
        assert plan is not None
        asked.append(Asked(Outcome(state), policy, plan))
    passes.select(asked)
    for one in asked:
        passes.take(one.outcome, False)
    return [one.outcome for one in asked]


def rank(index: int, port: int, out: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=index, world_size=2)
    world = torch.distributed.group.WORLD
    group: Any = SimpleNamespace(
        world_size=2, rank_in_group=index, device_group=world, cpu_group=world
    )
    ranks = Ranks(group)
    found: dict[str, Any] = {}
    mine = [keys[:, index * 2 : index * 2 + 2] for keys in all_keys()]
    policies = [load_policy("knorm"), FailsOn(index), load_policy("keydiff")]
    outcomes = select(policies, mine, ranks)
    found["evicted"] = [None if o.evicted is None else o.evicted.tolist() for o in outcomes]
    found["sums"] = ranks.sums
    found["errors"] = [o.error is not None for o in outcomes]
    ranks.note("evicted", "a", 1)
    ranks.compare()
    ranks.note("evicted", "b", 1)
    ranks.note("evicted", "c", 5 + index)
    try:
        ranks.compare()
    except InvariantError as error:
        found["stopped"] = str(error)
    ranks.agree_on_start({"version": "1", "config": "x"})
    try:
        ranks.agree_on_start({"version": "1", "config": str(index)})
    except HookError as error:
        found["refused"] = str(error)
    out.put((index, found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks() -> dict[int, dict[str, Any]]:
    context = torch.multiprocessing.get_context("spawn")
    out = context.Queue()
    port = free_port()
    workers = [context.Process(target=rank, args=(index, port, out)) for index in (0, 1)]
    for worker in workers:
        worker.start()
    found = dict(out.get(timeout=180) for _ in workers)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    return found


def test_split_heads_evict_what_all_heads_together_do(
    two_ranks: dict[int, dict[str, Any]],
) -> None:
    expected = [
        outcome.evicted
        for outcome in select([load_policy("knorm"), load_policy("keydiff")], all_keys(), Ranks())
    ]
    for found in two_ranks.values():
        for got, wanted in zip((found["evicted"][0], found["evicted"][2]), expected, strict=True):
            assert wanted is not None
            assert got == wanted.tolist()


def test_each_rank_alone_would_evict_others() -> None:
    """The negative control: without the mean the ranks differ."""
    halves = [
        select([load_policy("knorm")], [k[:, part : part + 2] for k in all_keys()], Ranks())
        for part in (0, 2)
    ]
    first, second = (outcome[0].evicted for outcome in halves)
    assert first is not None
    assert second is not None
    assert first.tolist() != second.tolist()


def test_all_requests_of_a_pass_cost_one_sum(two_ranks: dict[int, dict[str, Any]]) -> None:
    assert [found["sums"] for found in two_ranks.values()] == [1, 1]


def test_a_policy_that_fails_on_one_rank_ends_its_request_on_all(
    two_ranks: dict[int, dict[str, Any]],
) -> None:
    for found in two_ranks.values():
        assert found["errors"] == [False, True, False]


def test_all_ranks_stop_at_the_first_difference(two_ranks: dict[int, dict[str, Any]]) -> None:
    for found in two_ranks.values():
        assert "rank 0: evicted ['c', 5]; rank 1: evicted ['c', 6]" in found["stopped"]


def test_ranks_with_other_options_do_not_start(two_ranks: dict[int, dict[str, Any]]) -> None:
    for found in two_ranks.values():
        assert "rank 1 was started with another config than rank 0" in found["refused"]


def test_one_rank_alone_pays_for_nothing() -> None:
    ranks = Ranks()
    scores = torch.ones(3)
    assert ranks.mean(scores) is scores
    ranks.note("x")
    ranks.worked(every_step=True)
    ranks.agree_on_start({"config": "y"})
    assert ranks.trace_path("file") == "file"
    assert ranks.counters() == {"count": 1, "sums": 0, "summed_bytes": 0, "compared": 0}


def test_a_list_that_ends_early_differs_there() -> None:
    assert first_difference([["a"], ["a", "b"]]) == "rank 0: nothing; rank 1: b"
