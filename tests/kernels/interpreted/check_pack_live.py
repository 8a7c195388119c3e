"""`pack_live` in Triton and its reference, against the loop in its docstring."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreted.random_rows import Batch, make_batch
from vtoken_sglang.kernels.pack_live import triton as triton_pack_live
from vtoken_sglang.kernels.pack_live.reference import pack_live_reference
from vtoken_sglang.kernels.pack_live.triton import BLOCK, pack_live_triton, warm_up

CASES = [
    ([1], 0.0, 0),
    ([1, 2, 3], 0.5, 1),
    ([100, 7, 64, 300], 0.3, 4),
    ([500, 1, 900], 0.9, 0),
    ([BLOCK - 1, BLOCK, BLOCK + 1], 0.4, 2),
    ([3 * BLOCK + 5, 17, 2 * BLOCK], 0.7, 3),
    ([5 * BLOCK], 0.0, 0),
    ([], 0.0, 3),
]


def by_loop(batch: Batch, room: list[int]) -> tuple[list[int], list[int], list[int]]:
    slots, positions, lens = [], [], []
    for row, span, space in zip(batch.row_ids.tolist(), batch.spans.tolist(), room, strict=True):
        line = batch.rows[row].tolist()
        live = [pos for pos in range(span) if line[pos]]
        lens.append(len(live))
        kept = live[:space]
        slots += [line[pos] for pos in kept] + [0] * (space - len(kept))
        positions += kept + [-1] * (space - len(kept))
    return slots, positions, lens


@pytest.mark.parametrize("pack", [pack_live_triton, pack_live_reference])
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_loop(pack, slots_dtype: torch.dtype, case: tuple[list[int], float, int]) -> None:
    spans, evicted_share, padding = case
    batch = make_batch(spans, evicted_share=evicted_share, padding=padding, seed=len(spans))
    slots, positions, lens = by_loop(batch, batch.lens.tolist())
    got_slots = torch.full((len(slots) + 5,), -7, dtype=slots_dtype)
    got_positions = torch.full((len(slots) + 5,), -7, dtype=torch.int32)
    got_lens = torch.full((len(lens),), -7, dtype=torch.int32)
    pack(
        batch.rows,
        batch.row_ids,
        batch.spans,
        batch.indptr,
        got_slots,
        got_positions,
        got_lens,
        max_span=max([1, *spans]),
    )
    assert got_slots.tolist() == slots + [-7] * 5
    assert got_positions.tolist() == positions + [-7] * 5
    assert got_lens.tolist() == lens


@pytest.mark.parametrize("pack", [pack_live_triton, pack_live_reference])
@pytest.mark.parametrize("spans", [[40, 90], [BLOCK + 100, 2 * BLOCK]], ids=str)
def test_a_prefix_is_the_first_entries(pack, spans: list[int]) -> None:
    """Less room than live entries: the list stops early and disturbs no neighbour."""
    batch = make_batch(spans, evicted_share=0.5, seed=3)
    room = [5, 11]
    indptr = torch.tensor([0, 5, 16], dtype=torch.int32)
    wanted, _, lens = by_loop(batch, room)
    slots, found = torch.zeros(16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    pack(batch.rows, batch.row_ids, batch.spans, indptr, slots, None, found, max_span=max(spans))
    assert slots.tolist() == wanted
    assert found.tolist() == lens


@pytest.mark.parametrize("pack", [pack_live_triton, pack_live_reference])
def test_a_lane_without_room_writes_nothing(pack) -> None:
    batch = make_batch([30, 20], evicted_share=0.5, seed=4)
    indptr = torch.tensor([0, 0, int(batch.lens[1])], dtype=torch.int32)
    wanted, _, _ = by_loop(batch, [0, int(batch.lens[1])])
    slots = torch.zeros(len(wanted), dtype=torch.int32)
    pack(batch.rows, batch.row_ids, batch.spans, indptr, slots, max_span=30)
    assert slots.tolist() == wanted


@pytest.mark.parametrize("pack", [pack_live_triton, pack_live_reference])
def test_more_room_than_live_entries_reads_the_sink(pack) -> None:
    """Host and device disagree: the lane's count shows it, and the surplus reads the sink."""
    batch = make_batch([2000, 9], evicted_share=0.99, seed=5)
    room = [int(batch.lens[0]) + 1500, int(batch.lens[1])]
    indptr = torch.tensor([0, room[0], sum(room)], dtype=torch.int32)
    wanted, positions, lens = by_loop(batch, room)
    slots, got = torch.ones(sum(room), dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    got_positions = torch.zeros(sum(room), dtype=torch.int32)
    pack(batch.rows, batch.row_ids, batch.spans, indptr, slots, got_positions, got, max_span=2000)
    assert slots.tolist() == wanted
    assert got_positions.tolist() == positions
    assert got.tolist() == lens


@pytest.mark.parametrize("max_span", [300, BLOCK, 4 * BLOCK])
def test_any_bound_on_the_span_will_do(max_span: int) -> None:
    batch = make_batch([300, 200], evicted_share=0.5, width=4 * BLOCK, seed=6)
    wanted, _, _ = by_loop(batch, batch.lens.tolist())
    slots = torch.zeros(len(wanted), dtype=torch.int32)
    pack_live_triton(batch.rows, batch.row_ids, batch.spans, batch.indptr, slots, max_span=max_span)
    assert slots.tolist() == wanted


@pytest.mark.parametrize("width", [100, BLOCK, 5 * BLOCK + 3, 8 * BLOCK])
@pytest.mark.parametrize("observed", [False, True])
def test_warm_up_meets_every_variant(
    width: int, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of blocks that a span can give, rounded up to a power of two, with the types of
    the lists that are read by attention, and of those that attention is observed with."""
    spans: list[int] = []
    run = pack_live_triton

    def note(*lists: torch.Tensor | None, max_span: int) -> None:
        spans.append(max_span)
        types = [None if each is None else each.dtype for each in lists]
        by_host = torch.int32 if observed else torch.int64
        listed = torch.int32 if observed else None
        assert types[1:] == [torch.int64, by_host, torch.int32, torch.int32, listed]
        run(*lists, max_span=max_span)  # type: ignore[arg-type]

    monkeypatch.setattr(triton_pack_live, "pack_live_triton", note)
    options = {"spans_dtype": torch.int32, "positions": True} if observed else {}
    warm_up(torch.zeros(2, width, dtype=torch.int32), torch.int32, **options)  # type: ignore[arg-type]

    def variant(span: int) -> int:
        return triton_pack_live.triton.next_power_of_2(-(-span // BLOCK))

    assert {variant(span) for span in spans} == {variant(span) for span in range(1, width + 1)}


@pytest.mark.xfail(strict=True, reason="the comparison must see a wrong entry")
def test_deliberately_wrong() -> None:
    batch = make_batch([50, 20], evicted_share=0.5, seed=8)
    wanted, _, _ = by_loop(batch, batch.lens.tolist())
    slots = torch.zeros(len(wanted), dtype=torch.int32)
    rows = batch.rows + (batch.rows > 0)
    pack_live_triton(rows, batch.row_ids, batch.spans, batch.indptr, slots, max_span=50)
    assert slots.tolist() == wanted
