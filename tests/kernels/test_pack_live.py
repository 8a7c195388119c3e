"""The reference of `pack_live` against the loop in its docstring."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken_sglang.kernels.pack_live import pack_live


def pack_by_loop(
    rows: torch.Tensor, row_ids: list[int], spans: list[int], rooms: list[int]
) -> list[tuple[list[int], list[int], int]]:
    """Per lane: slots, their positions, live entries found."""
    lanes = []
    for row_id, span, room in zip(row_ids, spans, rooms, strict=True):
        live = [pos for pos in range(span) if int(rows[row_id, pos]) != 0]
        slots, positions = [int(rows[row_id, pos]) for pos in live[:room]], live[:room]
        spare = room - len(slots)
        lanes.append((slots + [0] * spare, positions + [-1] * spare, len(live)))
    return lanes


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], list[int], list[int]]:
    width = draw(st.integers(1, 40))
    num_rows = draw(st.integers(2, 5))
    slot = st.one_of(st.just(0), st.integers(1, 10_000))
    table = draw(
        st.lists(
            st.lists(slot, min_size=width, max_size=width), min_size=num_rows, max_size=num_rows
        )
    )
    rows = torch.tensor(table, dtype=torch.int32)
    rows[0] = 0
    bs = draw(st.integers(0, 6))
    row_ids = draw(st.lists(st.integers(0, num_rows - 1), min_size=bs, max_size=bs))
    spans = draw(st.lists(st.integers(0, width), min_size=bs, max_size=bs))
    live = [int((rows[row, :span] != 0).sum()) for row, span in zip(row_ids, spans, strict=True)]
    rooms = [max(0, count + draw(st.sampled_from([0, 0, 0, -1, 2]))) for count in live]
    return rows, row_ids, spans, rooms


@settings(deadline=None)
@given(batches(), st.integers(0, 3))
def test_lists_equal_the_loop(
    batch: tuple[torch.Tensor, list[int], list[int], list[int]], first: int
) -> None:
    rows, row_ids, spans, rooms = batch
    expected = pack_by_loop(rows, row_ids, spans, rooms)
    indptr = torch.tensor([*itertools.accumulate(rooms, initial=first)], dtype=torch.int32)
    slots, positions = (torch.full((int(indptr[-1]) + 2,), -7, dtype=torch.int32) for _ in "sp")
    lens = torch.empty(len(rooms), dtype=torch.int32)
    pack_live(
        rows,
        torch.tensor(row_ids, dtype=torch.int64),
        torch.tensor(spans, dtype=torch.int64),
        indptr,
        slots,
        positions,
        lens,
        max_span=max(spans, default=0),
    )
    around = [-7] * first, [-7] * 2
    for out, part in ((slots, 0), (positions, 1)):
        wanted = [value for lane in expected for value in lane[part]]  # type: ignore[attr-defined]
        assert out.tolist() == [*around[0], *wanted, *around[1]]
    assert lens.tolist() == [found for _, _, found in expected]
