"""What an `AttentionPlan` reads of the rows: the two modes, lengths, and a copy for good."""

from __future__ import annotations

import torch

from vtoken_sglang.kernels.cpu.attention import AttentionPlan, ReadMode
from vtoken_sglang.kernels.cpu.scratch import Scratch


def example_rows() -> torch.Tensor:
    rows = torch.zeros(3, 10, dtype=torch.int32)
    rows[1, :7] = torch.tensor([17, 18, 0, 0, 21, 40, 41])
    rows[2, :3] = torch.tensor([5, 0, 7])
    return rows


def plan_of(
    rows: torch.Tensor,
    row_ids: list[int],
    seq_lens: list[int],
    own_lens: list[int] | None,
    mode: ReadMode = "live",
) -> AttentionPlan:
    own = None if own_lens is None else torch.tensor(own_lens)
    lanes = (torch.tensor(row_ids), torch.tensor(seq_lens), own)
    return AttentionPlan(rows, *lanes, Scratch(), mode=mode)


def lanes_of(plan: AttentionPlan) -> list[list[int]]:
    return [lane.tolist() for lane in plan.lanes]


def test_live_drops_evicted_entries_and_keeps_order() -> None:
    plan = plan_of(example_rows(), [1, 2], [7, 3], [2, 1])
    assert lanes_of(plan) == [[17, 18, 21, 40, 41], [5, 7]]
    assert (plan.kv_lens, plan.own_lens) == ([5, 2], [2, 1])


def test_direct_takes_a_row_as_it_is() -> None:
    rows = example_rows()
    rows[1, 2:4] = torch.tensor([19, 20])
    plan = plan_of(rows, [1], [7], [2], "direct")
    assert lanes_of(plan) == [[17, 18, 19, 20, 21, 40, 41]]


def test_decode_owns_one_token_per_lane_and_padding_reads_the_sink() -> None:
    for mode in ("direct", "live"):
        plan = plan_of(example_rows()[[0, 2, 2]], [0], [1], None, mode)  # type: ignore[arg-type]
        assert (lanes_of(plan), plan.own_lens) == ([[0]], [1])
    plan = plan_of(example_rows(), [2, 0], [3, 1], None)
    assert (lanes_of(plan), plan.own_lens) == ([[5, 7], [0]], [1, 1])


def test_a_prefix_may_be_evicted_whole() -> None:
    rows = example_rows()
    rows[1, :5] = 0
    plan = plan_of(rows, [1], [7], [2])
    assert (lanes_of(plan), plan.kv_lens) == ([[40, 41]], [2])


def test_later_changes_of_the_rows_do_not_reach_the_plan() -> None:
    for mode in ("direct", "live"):
        rows = example_rows()
        plan = plan_of(rows, [1], [7], None, mode)  # type: ignore[arg-type]
        before = lanes_of(plan)
        rows[1, :7] = 99
        assert lanes_of(plan) == before
