"""Who holds which tree page, kept up to date as requests come and go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from vtoken_sglang.core.types import Generation, Row
from vtoken_sglang.engine.request_state import RequestState
from vtoken_sglang.engine.sharing.holders import PageHolders
from vtoken_sglang.options import RequestOptions, VTokenConfig

CONFIG = VTokenConfig(policy="random", keep=0.5)
SIZE, PAGES = 4, 60


def a_state(row: int, protected: int, shared: str) -> RequestState:
    options = RequestOptions.resolve(CONFIG, {"shared": shared})
    record: Any = SimpleNamespace(cache_protected_len=protected)
    return RequestState(
        request=SimpleNamespace(),
        record=record,
        row=Row(row),
        generation=Generation(1),
        options=options,
        policy=None,
    )


@pytest.fixture
def rows() -> torch.Tensor:
    """Five rows over the same first pages; 5 pages each further on differ."""
    table = torch.zeros(6, 40 * SIZE, dtype=torch.int32)
    for row in range(1, 6):
        pages = [*range(1, 7), *range(6 + 5 * row, 11 + 5 * row)]
        slots = (torch.tensor(pages)[:, None] * SIZE + torch.arange(SIZE)).flatten()
        table[row, : len(slots)] = slots.to(torch.int32)
    return table


def test_random_lives_give_the_counts_of_a_recount(rows: torch.Tensor) -> None:
    draw = np.random.default_rng(3)
    holders = PageHolders(rows, SIZE, PAGES)
    states: dict[int, RequestState] = {}
    for _ in range(300):
        row = int(draw.integers(1, 6))
        if row not in states:
            strategy = str(draw.choice(["auto", "mask"]))
            states[row] = a_state(row, SIZE * int(draw.integers(0, 9)), strategy)
        elif draw.random() < 0.3:
            holders.cut(states.pop(row), 0)
        else:  # the tree takes over more, or a fork lets a suffix go
            states[row].record.cache_protected_len = SIZE * int(draw.integers(0, 12))
        holders.update(states.values())
        assert holders.violations(states.values()) == []
        held = [rows[r, : s.record.cache_protected_len : SIZE] // SIZE for r, s in states.items()]
        counts = torch.bincount(torch.cat([torch.zeros(0, dtype=torch.int32), *held]).long())
        assert holders.total[: len(counts)].tolist() == counts.tolist()
        assert not holders.total[len(counts) :].any()


def test_only_those_that_may_fork_count_as_pruning(rows: torch.Tensor) -> None:
    holders = PageHolders(rows, SIZE, PAGES)
    holders.update([a_state(1, 3 * SIZE, "auto"), a_state(2, 2 * SIZE, "skip")])
    assert holders.total[1:5].tolist() == [2, 2, 1, 0]
    assert holders.pruning[1:5].tolist() == [1, 1, 1, 0]


def test_a_miscount_is_found(rows: torch.Tensor) -> None:
    holders = PageHolders(rows, SIZE, PAGES)
    state = a_state(1, 3 * SIZE, "auto")
    holders.update([state])
    holders.total[2] += 1
    assert holders.violations([state]) == ["holders of tree pages [2] are miscounted"]


def test_nothing_is_read_where_nothing_changed(rows: torch.Tensor) -> None:
    """A step in which no lock moved touches no page: counting is by change, not by existence."""
    holders = PageHolders(rows, SIZE, PAGES)
    states = [a_state(row, 6 * SIZE, "auto") for row in range(1, 6)]
    holders.update(states)
    holders._rows = None  # type: ignore[assignment]  # a read would fail
    holders._count = None  # type: ignore[assignment,method-assign]  # a recount as well
    for _ in range(3):
        holders.update(states)
