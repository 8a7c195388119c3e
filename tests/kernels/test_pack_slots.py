"""`pack_slots` against the loop in its docstring."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vtoken_sglang.kernels.pack_slots import pack_slots


def pack_by_loop(
    rows: torch.Tensor,
    row_ids: list[int],
    spans: list[int],
    own_lens: list[int],
    drop_evicted: bool,
) -> list[list[int]]:
    packed = []
    for row_id, span, own in zip(row_ids, spans, own_lens, strict=True):
        lane = []
        for pos in range(span):
            slot = int(rows[row_id, pos])
            if slot != 0 or pos >= span - own or not drop_evicted:
                lane.append(slot)
        packed.append(lane)
    return packed


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
    own_lens = [draw(st.integers(0, span)) for span in spans]
    return rows, row_ids, spans, own_lens


@settings(deadline=None)
@given(batches(), st.booleans())
def test_pack_equals_loop(
    batch: tuple[torch.Tensor, list[int], list[int], list[int]], drop_evicted: bool
) -> None:
    rows, row_ids, spans, own_lens = batch
    expected = pack_by_loop(rows, row_ids, spans, own_lens, drop_evicted)
    packed = pack_slots(
        rows,
        torch.tensor(row_ids, dtype=torch.int64),
        torch.tensor(spans, dtype=torch.int64),
        torch.tensor(own_lens, dtype=torch.int64),
        drop_evicted=drop_evicted,
    )
    assert packed.lens.tolist() == [len(lane) for lane in expected]
    assert packed.slots.tolist() == [slot for lane in expected for slot in lane]
    assert (
        packed.indptr.tolist()[1:]
        == torch.tensor([len(lane) for lane in expected], dtype=torch.int64).cumsum(0).tolist()
    )
    assert packed.indptr[0] == 0
    assert packed.slots.dtype == packed.indptr.dtype == packed.lens.dtype == torch.int64


def test_padding_lane_reads_the_sink() -> None:
    rows = torch.zeros(2, 8, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int64)
    packed = pack_slots(rows, torch.zeros(1, dtype=torch.int64), one, one)
    assert packed.slots.tolist() == [0]


def test_dead_prefix_is_empty_not_the_sink() -> None:
    rows = torch.zeros(2, 8, dtype=torch.int32)
    packed = pack_slots(rows, torch.tensor([1]), torch.tensor([5]), torch.tensor([0]))
    assert packed.slots.numel() == 0
    assert packed.lens.tolist() == [0]
