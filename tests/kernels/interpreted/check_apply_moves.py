"""`apply_moves` in Triton against its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vtoken_sglang.kernels import triton_apply_moves
from vtoken_sglang.kernels.apply_moves_ref import apply_moves_ref
from vtoken_sglang.kernels.triton_apply_moves import BLOCK, apply_moves_triton, warm_up
from vtoken_sglang.kernels.upload import upload


def random_moves(n: int, *, padding: int = 0) -> tuple[torch.Tensor, ...]:
    """Rows, and n distinct (row, position) entries with new slots; the last ones are padding."""
    generator = torch.Generator().manual_seed(n)
    rows = torch.randint(1, 10_000, (9, 400), generator=generator, dtype=torch.int32)
    rows[0] = 0
    where = torch.randperm(8 * 400, generator=generator)[:n]
    row_ids, positions = where // 400 + 1, where % 400
    slots = torch.randint(0, 10_000, (n,), generator=generator)
    row_ids[n - padding :] = 0
    return rows, row_ids, positions, slots


@pytest.mark.parametrize("n", [0, 1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("padding", [0, 1])
def test_equals_reference(n: int, padding: int) -> None:
    rows, row_ids, positions, slots = random_moves(n, padding=min(padding, n))
    expected = rows.clone()
    apply_moves_ref(expected, row_ids, positions, slots)
    apply_moves_triton(rows, row_ids, positions, slots)
    assert torch.equal(rows, expected)
    assert not rows[0].any()


def test_reference_equals_loop() -> None:
    rows, row_ids, positions, slots = random_moves(50, padding=5)
    expected = rows.clone()
    for row, pos, slot in zip(row_ids.tolist(), positions.tolist(), slots.tolist(), strict=True):
        if row:
            expected[row, pos] = slot
    apply_moves_ref(rows, row_ids, positions, slots)
    assert torch.equal(rows, expected)


def test_warm_up_meets_both_alignments_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists as they are uploaded: with an odd count the second starts off a multiple of 16."""
    seen: set[tuple[bool, ...]] = set()
    run = apply_moves_triton

    def note(rows: torch.Tensor, *lists: torch.Tensor) -> None:
        seen.add(tuple(each.data_ptr() % 16 == 0 for each in lists))
        run(rows, *lists)

    rows = torch.randint(1, 100, (3, 64), dtype=torch.int32)
    before = rows.clone()
    monkeypatch.setattr(triton_apply_moves, "apply_moves_triton", note)
    warm_up(rows)
    assert torch.equal(rows, before)
    uploaded = [upload(np.zeros((3, n)), "cpu") for n in (1, 2, 7, 32)]
    assert seen == {tuple(each.data_ptr() % 16 == 0 for each in lists) for lists in uploaded}


@pytest.mark.xfail(strict=True, reason="the comparison must see a wrong entry")
def test_deliberately_wrong() -> None:
    rows, row_ids, positions, slots = random_moves(50)
    expected = rows.clone()
    apply_moves_ref(expected, row_ids, positions, slots)
    apply_moves_triton(rows, row_ids, positions, slots + 1)
    assert torch.equal(rows, expected)
