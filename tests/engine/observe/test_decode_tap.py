"""The static buffers of watched decode lanes: who is in them, and that the others pay nothing."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.observed_request import OBSERVING, RowState, policy_named
from vtoken_sglang.engine.observe.decode_tap import DecodeTap, WatchedLane
from vtoken_sglang.engine.observe.observer import ForwardLane, Observer

ROWS, WIDTH, HEADS, DIM = 6, 40, 2, 4


def make_tap(num_slots: int = 200) -> tuple[DecodeTap, torch.Tensor]:
    rows = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    slots = torch.randperm(150, generator=torch.Generator().manual_seed(0)) + 1
    rows[1, :30], rows[2, :20], rows[3, :25] = slots[:30], slots[30:50], slots[50:75]
    rows[2, 3:9] = 0
    return DecodeTap(rows, num_slots, frozenset({0}), score_bytes=1 << 16), rows


def watched(
    lane: int, score_row: int, span: int, live: int, below_uniform: bool = False
) -> WatchedLane:
    return WatchedLane(
        lane=lane, score_row=score_row, below_uniform=below_uniform, span=span, live_len=live
    )


def run(tap: DecodeTap, lanes: int) -> None:
    """One layer in which every live key gets its share alike: q is 0 and lse the log of a count."""
    q = torch.zeros(lanes, HEADS, DIM)
    lse = torch.full((lanes, HEADS), 10.0).log()
    tap.on_layer(q, torch.randn(200, 1, DIM), lse, 1.0)


def test_only_watched_lanes_are_scored() -> None:
    tap, rows = make_tap()
    lanes = [watched(0, 5, 30, 30), watched(2, 2, 20, 14)]
    tap.watch(torch.tensor([1, 3, 2]), lanes, clear=[])
    assert tap.active
    run(tap, 5)  # two lanes of padding
    expected = torch.zeros(tap.scores.shape)
    expected[5, :30] = 0.2
    expected[2, :20] = 0.2 * (rows[2, :20] != 0)
    torch.testing.assert_close(tap.scores, expected)
    assert tap.q_heads == HEADS


def test_a_step_without_watched_lanes_adds_nothing() -> None:
    tap, _ = make_tap()
    tap.watch(torch.tensor([1]), [watched(0, 4, 30, 30)], clear=[])
    run(tap, 1)
    before = tap.scores.clone()
    tap.watch(torch.tensor([1, 2]), [], clear=[])
    assert not tap.active
    run(tap, 2)  # a graph replays its kernels all the same
    assert torch.equal(tap.scores, before)


def test_rows_are_cleared_first_and_counts_are_counted() -> None:
    tap, _ = make_tap()
    tap.scores[3:5] = 7.0
    tap.watch(torch.tensor([1, 3]), [watched(1, 3, 25, 25, below_uniform=True)], clear=[3])
    run(tap, 2)  # a tenth each, which is more than one of 25
    assert not tap.scores[3].any()
    assert bool((tap.scores[4] == 7.0).all())
    tap.watch(torch.tensor([1, 3]), [watched(1, 3, 5, 5, below_uniform=True)], clear=[])
    run(tap, 2)  # less than one of 5
    assert tap.scores[3].tolist() == [2.0] * 5 + [0.0] * (WIDTH - 5)


def test_more_than_the_lists_hold_is_a_mistake_of_the_caller() -> None:
    tap, _ = make_tap(num_slots=10)
    assert tap.room == 40
    with pytest.raises(AssertionError):
        tap.watch(torch.tensor([1, 2]), [watched(0, 1, 30, 30), watched(1, 2, 20, 14)], clear=[])


@pytest.mark.parametrize("name", OBSERVING)
def test_a_query_that_does_not_fit_is_not_taken_for_one_that_was_seen(name: str) -> None:
    """Three decoding requests, room for two: the third is as if its query had not been observed,
    and is the first of the next step."""
    policy = policy_named(name)
    rows = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    tap = DecodeTap(rows, 200, frozenset({0}), score_bytes=1 << 16)
    tap.room = 50
    observer = Observer(
        rows=rows, k_buffers=[torch.zeros(200, 1, DIM)], capacity=1, observe_layers="all",
        observe_every=1, tap=tap,
    )  # fmt: skip
    rows[1:4, :30] = 1
    states = [RowState(rows, row, policy) for row in (1, 2, 3)]
    taken: list[list[int]] = []
    tap.watch = lambda _rows, lanes, _clear: taken.append([each.lane for each in lanes])  # type: ignore[method-assign,assignment]
    seen = []
    for step in range(3):
        lanes = [ForwardLane(state, 19 + step, 20 + step, prompt_ends=True) for state in states]
        observer.prepare(lanes, True, torch.tensor([1, 2, 3]))
        seen.append([state.watched.observed_len for state in states if state.watched])
    if name == "snapkv":  # the first query ended the prompt, and only that one counts
        assert taken == [[0, 1], [2], []]
        assert observer.counters()["unobserved_queries"] == 1
        return
    assert taken == [[0, 1], [0, 2], [1, 2]]
    assert seen == [[20, 20, 0], [21, 20, 21], [21, 22, 22]]
    assert observer.counters()["unobserved_queries"] == 3


def test_buffers_stay_where_they_are() -> None:
    tap, _ = make_tap()
    held = [tap.scores, tap._lanes, tap._slots, tap._positions, tap._queries]
    before = [tensor.data_ptr() for tensor in held]
    for _ in range(3):
        tap.watch(torch.tensor([1]), [watched(0, 4, 30, 30)], clear=[4])
        run(tap, 1)
        tap.watch(torch.tensor([1]), [], clear=[])
    held = [tap.scores, tap._lanes, tap._slots, tap._positions, tap._queries]
    assert [tensor.data_ptr() for tensor in held] == before
