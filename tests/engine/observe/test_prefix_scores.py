"""Scores of cached prefixes: named by content, kept by who computed them, bounded, dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from vtoken_sglang.core.device_work import WorkAtOnce
from vtoken_sglang.engine.observe.prefix_scores import PrefixScoreKeeper, PrefixScores
from vtoken_sglang.engine.observe.queries import rows_needed
from vtoken_sglang.engine.request_state import Watched
from vtoken_sglang.policy.base import Gather, Observation

TOTAL, BELOW_UNIFORM = Observation(Gather.TOTAL), Observation(Gather.BELOW_UNIFORM, 20)
SHARED = list(range(1000, 1100))


def request(tokens: list[int], protected: int, **fields: Any) -> Any:
    kv = SimpleNamespace(cache_protected_len=protected)
    plain = {"extra_key": None, "cache_salt": None, "skip_radix_cache_insert": False}
    return SimpleNamespace(origin_input_ids=tokens, output_ids=[], kv=kv, **{**plain, **fields})


class Server:
    """A keeper and a score table; requests take rows in turn."""

    def __init__(self, page_size: int = 16, max_tokens: int = 4096) -> None:
        self.keeper = PrefixScoreKeeper(PrefixScores(page_size, max_tokens), WorkAtOnce())
        self.scores = torch.zeros(50, 200)
        self.next_row = 1

    def enter(self, who: Any, cached: int, observation: Observation = TOTAL) -> Watched:
        rows = tuple(range(self.next_row, self.next_row + rows_needed(observation)))
        self.next_row += len(rows)
        watched = Watched(observation, rows)
        self.keeper.begin(who, watched, cached, self.scores)
        return watched

    def row(self, watched: Watched) -> list[float]:
        values: list[float] = self.scores[list(watched.score_rows)].sum(dim=0).tolist()
        return values

    def compute(self, who: Any, observation: Observation = TOTAL) -> Watched:
        """The request computed all of its prompt: position p received p + 1."""
        watched = self.enter(who, 0, observation)
        length = len(who.origin_input_ids)
        self.scores[watched.score_rows[0], :length] += torch.arange(1.0, length + 1)
        self.keeper.keep(who, watched, self.scores)
        return watched


def test_the_next_request_starts_from_what_the_first_gathered() -> None:
    server = Server()
    server.compute(request([*SHARED, 1, 2, 3], 96))
    found = server.enter(request([*SHARED, 7, 8], 96), 80)
    assert server.row(found)[:80] == [pos + 1.0 for pos in range(80)]
    assert set(server.row(found)[80:]) == {0.0}
    assert found.observed_len == 80
    assert found.first_own == 5


def test_a_hit_that_ends_inside_a_block_takes_whole_blocks() -> None:
    server = Server(page_size=1)
    server.compute(request([*SHARED, 1], 101))
    found = server.enter(request([*SHARED, 7], 101), 85)
    assert found.observed_len == 80
    assert found.first_own == 6


@pytest.mark.parametrize("fields", [{"extra_key": "tenant"}, {"cache_salt": "salt"}])
def test_namespaces_are_kept_apart(fields: dict[str, str]) -> None:
    server = Server()
    server.compute(request(SHARED, 96))
    assert server.enter(request(SHARED, 96, **fields), 96).observed_len == 0
    server.compute(request(SHARED, 96, **fields))
    assert server.enter(request(SHARED, 96, **fields), 96).observed_len == 96


def test_policies_are_kept_apart() -> None:
    server = Server()
    server.compute(request(SHARED, 96))
    assert server.enter(request(SHARED, 96), 96, BELOW_UNIFORM).observed_len == 0
    last = server.enter(request(SHARED, 96), 96, Observation(Gather.LAST))
    assert last.observed_len == 0
    assert last.kept


def test_other_tokens_know_nothing() -> None:
    server = Server()
    server.compute(request(SHARED, 96))
    other = [*SHARED]
    other[3] += 1
    assert server.enter(request(other, 96), 96).observed_len == 0
    other = [*SHARED]
    other[40] += 1
    assert server.enter(request(other, 96), 96).observed_len == 32


def test_followers_do_not_add_to_what_they_hit() -> None:
    server = Server()
    server.compute(request(SHARED, 96))
    follower = request([*SHARED, *range(50)], 144)
    watched = server.enter(follower, 96)
    server.scores[watched.score_rows[0]] += 500.0
    server.keeper.keep(follower, watched, server.scores)
    third = server.row(server.enter(request([*SHARED, *range(50)], 144), 144))
    assert third[:96] == [pos + 1.0 for pos in range(96)]
    assert third[96:144] == [500.0] * 48


def test_a_private_prompt_keeps_nothing() -> None:
    server = Server()
    server.compute(request(SHARED, 96, skip_radix_cache_insert=True))
    server.compute(request(SHARED, 0))
    assert len(server.keeper.store) == 0


def test_history_windows_go_on_from_the_prefix() -> None:
    server = Server()
    server.compute(request(SHARED, 96), BELOW_UNIFORM)
    found = server.enter(request([*SHARED, 5], 96), 96, BELOW_UNIFORM)
    assert found.block == 95 // 20
    assert server.row(found)[:96] == [pos + 1.0 for pos in range(96)]
    assert server.scores[found.score_rows[0], :96].tolist() == [pos + 1.0 for pos in range(96)]


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    server = Server(max_tokens=160)
    for first in range(5):
        server.compute(request([first, *SHARED], 96))
        assert len(server.keeper.store) <= 10
    assert server.enter(request([0, *SHARED], 96), 96).observed_len == 0
    assert server.enter(request([4, *SHARED], 96), 96).observed_len == 96


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    """A chain without its head is of no use, and nobody would ever put the head back."""
    store = PrefixScores(16, max_tokens=96)
    first = store.names("", range(64), 64)
    store.put(first, 0, np.arange(64, dtype=np.float32))
    assert len(store.get(first[:2])) == 32  # a follower, whose prompt goes on differently
    other = store.names("", range(100, 148), 48)
    store.put(other, 0, np.zeros(48, np.float32))
    assert len(store) == 6
    assert store.get(first).tolist() == [*range(48)]
    assert len(store.get(other)) == 48
    # Blocks of its own: the head that the request found is used with them.
    longer = [*first[:2], *store.names("", [*range(32), *range(500, 532)], 64)[2:]]
    store.put(longer, 2, np.ones(64, np.float32))
    assert len(store.get(longer)) == 64


def test_a_flush_forgets() -> None:
    server = Server()
    server.compute(request(SHARED, 96))
    server.keeper.clear()
    assert len(server.keeper.store) == 0
    assert server.enter(request(SHARED, 96), 96).observed_len == 0


def test_late_scores_are_stored_a_fixed_number_of_passes_later() -> None:
    server = Server()
    late = SimpleNamespace(take=lambda: np.ones(96, np.float32))
    server.keeper._work = SimpleNamespace(lag=2, start=lambda work: late)  # type: ignore[assignment]
    server.compute(request(SHARED, 96))
    for _ in range(2):
        assert len(server.keeper.store) == 0
        server.keeper.next_pass()
    assert server.row(server.enter(request(SHARED, 96), 96))[:96] == [1.0] * 96
