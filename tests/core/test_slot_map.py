"""The slot map's two modes, its lengths and its independence from later row changes."""

from __future__ import annotations

import torch

from vtoken_sglang.core.slot_map import build_slot_map


def example_rows() -> torch.Tensor:
    rows = torch.zeros(3, 10, dtype=torch.int32)
    rows[1, :7] = torch.tensor([17, 18, 0, 0, 21, 40, 41])
    rows[2, :3] = torch.tensor([5, 0, 7])
    return rows


def test_direct_takes_the_row_as_it_is() -> None:
    slot_map = build_slot_map(
        example_rows(), torch.tensor([1]), torch.tensor([7]), torch.tensor([2]), mode="direct"
    )
    assert slot_map.packed.slots.tolist() == [17, 18, 0, 0, 21, 40, 41]
    assert slot_map.kv_lens.tolist() == [7]
    assert slot_map.prefix_lens.tolist() == [5]


def test_live_drops_dead_and_keeps_order() -> None:
    slot_map = build_slot_map(
        example_rows(),
        torch.tensor([1, 2]),
        torch.tensor([7, 3]),
        torch.tensor([2, 1]),
        mode="live",
    )
    assert slot_map.packed.slots.tolist() == [17, 18, 21, 40, 41, 5, 7]
    assert slot_map.packed.indptr.tolist() == [0, 5, 7]
    assert slot_map.kv_lens.tolist() == [5, 2]
    assert slot_map.prefix_lens.tolist() == [3, 1]
    assert slot_map.own_lens.tolist() == [2, 1]


def test_decode_owns_one_token_per_lane() -> None:
    slot_map = build_slot_map(
        example_rows(), torch.tensor([2, 0]), torch.tensor([3, 1]), mode="live"
    )
    assert slot_map.packed.slots.tolist() == [5, 7, 0]
    assert slot_map.prefix_lens.tolist() == [1, 0]


def test_entirely_dead_prefix() -> None:
    rows = example_rows()
    rows[1, :5] = 0
    slot_map = build_slot_map(
        rows, torch.tensor([1]), torch.tensor([7]), torch.tensor([2]), mode="live"
    )
    assert slot_map.packed.slots.tolist() == [40, 41]
    assert slot_map.prefix_lens.tolist() == [0]


def test_later_row_changes_do_not_reach_the_map() -> None:
    rows = example_rows()
    for mode in ("direct", "live"):
        slot_map = build_slot_map(rows, torch.tensor([1]), torch.tensor([7]), mode=mode)
        before = slot_map.packed.slots.tolist()
        rows[1, :7] = 99
        assert slot_map.packed.slots.tolist() == before
        rows.copy_(example_rows())
