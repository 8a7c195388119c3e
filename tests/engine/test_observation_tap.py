"""The static buffers of watched decode lanes: who is in them, and that the others pay nothing."""

from __future__ import annotations

import torch

from vtoken_sglang.engine.observation_tap import DecodeTap, WatchedLane

ROWS, WIDTH, HEADS, DIM = 6, 40, 2, 4


def make_tap(num_slots: int = 200) -> tuple[DecodeTap, torch.Tensor]:
    rows = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
    slots = torch.randperm(150, generator=torch.Generator().manual_seed(0)) + 1
    rows[1, :30], rows[2, :20], rows[3, :25] = slots[:30], slots[30:50], slots[50:75]
    rows[2, 3:9] = 0
    return DecodeTap(rows, num_slots, frozenset({0}), score_bytes=1 << 16), rows


def watched(lane: int, score_row: int, span: int, live: int, rarely: bool = False) -> WatchedLane:
    return WatchedLane(lane=lane, score_row=score_row, rarely=rarely, span=span, live_len=live)


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
    tap.watch(torch.tensor([1, 3]), [watched(1, 3, 25, 25, rarely=True)], clear=[3])
    run(tap, 2)  # a tenth each, which is more than one of 25
    assert not tap.scores[3].any()
    assert bool((tap.scores[4] == 7.0).all())
    tap.watch(torch.tensor([1, 3]), [watched(1, 3, 5, 5, rarely=True)], clear=[])
    run(tap, 2)  # less than one of 5
    assert tap.scores[3].tolist() == [2.0] * 5 + [0.0] * (WIDTH - 5)


def test_what_does_not_fit_is_left_out_and_counted() -> None:
    tap, _ = make_tap(num_slots=20)
    lanes = [watched(0, 1, 30, 30), watched(1, 2, 20, 14), watched(2, 3, 5, 5)]
    tap.watch(torch.tensor([1, 2, 3]), lanes, clear=[])
    run(tap, 3)
    assert tap.left_out == 1
    assert [bool(tap.scores[row].any()) for row in (1, 2, 3)] == [True, False, True]


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
