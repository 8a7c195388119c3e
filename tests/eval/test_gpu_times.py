"""The timed parts of the GPU check: their work is right, whatever a clock would say.

Nothing is timed here: the clock is replaced by one that runs the work once, so the figures'
values mean nothing; what is tested is that the work runs, on what, and how figures are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from eval.bench import kernel_times
from eval.bench.flashinfer_checks import Sizes, decode_wanted, greatest, make_pruned, repacked
from eval.bench.timing import ratio_figure
from tests.helpers import flashinfer_stand_in as stand_in
from vtoken_sglang.kernels.copy_slots.reference import copy_slots_reference
from vtoken_sglang.kernels.pack_live.reference import pack_live_reference

CPU = torch.device("cpu")
SMALL = Sizes(q_heads=4, kv_heads=2, dim=16, lanes=3, span=90, dtype=torch.float32)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Results of the work that would have been timed, in order."""
    results: list[object] = []

    def once(work: Callable[[], object], repeats: int) -> list[float]:
        results.append(work())
        return [float(len(results))] * repeats

    monkeypatch.setattr(kernel_times, "times_ms", once)
    monkeypatch.setattr(kernel_times, "copy_slots_triton", copy_slots_reference)
    monkeypatch.setattr(kernel_times, "pack_live_triton", pack_live_reference)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**27, 2**27))
    return results


def test_ratios_are_of_pairs() -> None:
    figure = ratio_figure([1.0, 2.0, 9.0], [2.0, 2.0, 3.0], "u")
    assert figure["value"] == 1.0
    assert figure["spread"] == {"min": 0.5, "q1": 0.75, "q3": 2.0, "max": 3.0}


def test_copy_figures(runs: list[object]) -> None:
    figures = kernel_times.copy_figures(CPU, 3, 1, layers=2)
    assert set(figures) == {"copy_ratio", "copy_bandwidth"}
    # The device's own copy (second) over ours (first): more is better, 1 is its bandwidth.
    assert figures["copy_ratio"]["value"] == 2.0
    assert len(runs) == 2


def test_copied_slots_do_not_overlap(runs: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    monkeypatch.setattr(
        kernel_times, "copy_slots_triton", lambda buffers, src, dst: seen.append((src, dst))
    )
    kernel_times.copy_figures(CPU, 1, 1, layers=2)
    src, dst = (set(slots.tolist()) for slots in seen[0])
    assert len(src) == len(dst) == len(seen[0][0])
    assert not src & dst


def test_pack_figures(runs: list[object]) -> None:
    gathered = []

    def gather_rows(*lists: torch.Tensor) -> None:
        gathered.append(len(lists))

    figures = kernel_times.pack_figures(gather_rows, CPU, 2, 1, shapes=[(3, 50), (2, 400)])
    assert set(figures) == {
        "pack_live_us_3x50",
        "pack_live_us_2x400",
        "pack_time_ratio_3x50",
        "pack_time_ratio_2x400",
    }
    assert gathered == [5, 5]
    without = kernel_times.pack_figures(None, CPU, 2, 1, shapes=[(3, 50)])
    assert set(without) == {"pack_live_us_3x50"}


def test_attention_figures(runs: list[Any]) -> None:
    figures = kernel_times.attention_figures(stand_in, CPU, 2, 1, sizes=SMALL)
    assert set(figures) == {
        "decode_time_ratio_repacked_keep30",
        "decode_time_ratio_pruned_keep30",
    }
    scattered, packed, full = runs
    # The same tokens wherever they lie; not the same as all of them.
    torch.testing.assert_close(packed, scattered, atol=1e-6, rtol=1e-6)
    assert (full - scattered).abs().max() > 1e-2
    assert figures["decode_time_ratio_repacked_keep30"]["value"] == 2.0
    assert figures["decode_time_ratio_pruned_keep30"]["value"] == pytest.approx(1 / 3)


def test_repacked_rows_hold_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    pruned = make_pruned(SMALL, CPU, generator, padding=1)
    dense = repacked(pruned)
    q = pruned.random(SMALL.lanes + 1, SMALL.q_heads, generator)
    before, after = (decode_wanted(part, q, *part.lists()) for part in (pruned, dense))
    assert greatest(after, before) < 1e-12
    table, size = dense.rows.table, SMALL.page_size
    for row, length in zip(dense.rows.row_ids.tolist(), dense.rows.lens.tolist(), strict=True):
        if row:
            slots = table[row, :length].tolist()
            assert all(slot % size == pos % size for pos, slot in enumerate(slots))
            assert not table[row, length:].any()
