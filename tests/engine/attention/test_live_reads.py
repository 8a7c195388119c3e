"""The view and the lists that the GPU backends share: no waiting for the device, no other rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind, KVLocPlan
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.helpers.attention_batches import Geometry, cuda_replaced, make_runner
from vtoken_sglang.engine.attention import live_reads
from vtoken_sglang.engine.attention.live_lengths import measure
from vtoken_sglang.engine.attention.live_reads import LiveReads, install_live_reads, live_view
from vtoken_sglang.errors import UnsupportedModeError

ROWS = [3, 9]


def device_batch(mode: ForwardMode) -> tuple[KVLocPlan, SimpleNamespace]:
    """A measured plan and its batch, whose device tensors are on "meta": they hold no data, so code
    that waits for the device cannot go on."""
    spans = torch.tensor([10, 20])
    plan = KVLocPlan.__new__(KVLocPlan)
    plan.seq_lens, plan.seq_lens_cpu = spans.to("meta"), spans
    batch = SimpleNamespace(
        forward_mode=mode,
        kv_loc_plan=plan,
        seq_lens=spans.to("meta"),
        seq_lens_cpu=spans,
        seq_lens_sum=30,
        extend_prefix_lens=torch.tensor([8, 0]).to("meta"),
        extend_prefix_lens_cpu=[8, 0],
    )
    requests = [SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row)) for row in ROWS]
    schedule = SimpleNamespace(
        reqs=requests, prefix_lens=None if mode == ForwardMode.DECODE else [8, 0]
    )
    plan.kv_lens = measure(schedule, batch, {3: 5, 9: 0}.__getitem__)
    return plan, batch


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.MIXED])
def test_nothing_waits_for_the_device(mode: ForwardMode, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, batch = device_batch(mode)
    view = live_view(batch)
    assert view.seq_lens.is_meta
    assert view.seq_lens_cpu.tolist() == [5, 20]
    assert view.seq_lens_sum == 25
    if mode != ForwardMode.DECODE:
        assert view.extend_prefix_lens.is_meta
        assert view.extend_prefix_lens.dtype == torch.int32
        assert view.extend_prefix_lens_cpu == [3, 0]
    packed: list[dict[str, Any]] = []
    monkeypatch.setattr(
        live_reads, "pack_live", lambda *lists, max_span: packed.append({"max_span": max_span})
    )
    rows = torch.zeros(4, 64, dtype=torch.int32, device="meta")
    translator = SimpleNamespace(req_to_token=rows, pack_read_stream=None)
    lanes = torch.zeros(2, dtype=torch.int64, device="meta")
    assert not LiveReads(translator).pack_read_stream(
        plan, req_pool_indices=lanes, seq_lens=view.seq_lens, indptr=lanes, out=lanes
    )
    assert packed == [{"max_span": 20}]


def test_the_batch_itself_is_untouched() -> None:
    _, batch = device_batch(ForwardMode.EXTEND)
    before = dict(vars(batch))
    live_view(batch)
    assert vars(batch) == before


def test_a_batch_without_live_lengths_is_its_own_view() -> None:
    plan, batch = device_batch(ForwardMode.DECODE)
    plan.kv_lens = None
    assert live_view(batch) is batch
    del plan.kv_lens  # as on a plan that a graph runner makes for its own buffers
    assert live_view(batch) is batch
    batch.kv_loc_plan = None
    assert live_view(batch) is batch


def test_padded_lanes_keep_their_length() -> None:
    plan, batch = device_batch(ForwardMode.DECODE)
    plan.kv_lens = replace(plan.kv_lens, lens=plan.kv_lens.lens_cpu)
    batch.seq_lens = batch.seq_lens_cpu = torch.tensor([10, 20, 1, 1])
    view = live_view(batch)
    assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == [5, 20, 1, 1]
    assert view.seq_lens_sum == 27


@pytest.mark.parametrize(
    "special",
    [
        {"kv_start_idx": torch.zeros(2)},
        {"kind": IdSpaceKind.SLIDING_WINDOW},
        {"token_mapping": torch.zeros(2)},
    ],
)
def test_parts_of_rows_are_refused(special: dict[str, Any]) -> None:
    plan, _ = device_batch(ForwardMode.DECODE)
    translator = SimpleNamespace(req_to_token=torch.zeros(4, 64), pack_read_stream=None)
    lanes = torch.zeros(2)
    with pytest.raises(UnsupportedModeError, match="sliding-window or cross"):
        LiveReads(translator).pack_read_stream(
            plan, req_pool_indices=lanes, seq_lens=lanes, indptr=lanes, out=lanes, **special
        )


def test_installing_twice_is_once() -> None:
    with cuda_replaced():
        translator = make_runner(Geometry()).kv_index_translator
    install_live_reads(translator, torch.int32)
    first = translator.pack_read_stream
    install_live_reads(translator, torch.int32)
    assert translator.pack_read_stream == first


def test_a_translating_pool_is_refused() -> None:
    with cuda_replaced():
        translator = make_runner(Geometry()).kv_index_translator
    translator.is_translating = True
    with pytest.raises(UnsupportedModeError, match="unified memory"):
        install_live_reads(translator, torch.int32)
