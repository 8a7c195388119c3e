"""The copy engine of CUDA: kernels compiled at start, every forward noted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
pytest.importorskip("triton", reason="needs Triton")

from vtoken_sglang.core.copy_engine import SyncCopyEngine
from vtoken_sglang.engine.runtime import copiers
from vtoken_sglang.engine.runtime.copiers import make_copy_engine, note_forward
from vtoken_sglang.kernels.copy_slots import triton as triton_copy_slots
from vtoken_sglang.options import VTokenConfig


def scheduler() -> Any:
    """A scheduler on CUDA as far as it is read; its tensors are not."""
    pool = SimpleNamespace(k_buffer=[torch.zeros(4, 1, 2)], v_buffer=[torch.ones(4, 1, 2)])
    return SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(device="cuda", get_kvcache=lambda: pool)
    )


def test_kernels_are_compiled_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr(copiers, "StreamCopyEngine", lambda device: SimpleNamespace())
    monkeypatch.setattr(triton_copy_slots, "warm_up", warmed.append)
    made = scheduler()
    make_copy_engine(made, VTokenConfig(policy="random", keep=0.5))
    (buffers,) = warmed
    pool = made.token_to_kv_pool_allocator.get_kvcache()
    own = [*pool.k_buffer, *pool.v_buffer]
    assert len(buffers) == len(own)
    assert all(each is other for each, other in zip(buffers, own, strict=True))


def test_a_forward_is_noted_by_an_event_on_the_stream_it_was_launched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded: list[object] = []
    event = SimpleNamespace(record=recorded.append)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "forward stream")
    noted: list[object] = []
    note_forward(SimpleNamespace(note_forward=lambda each: noted.append((each, *recorded))))
    assert noted == [(event, "forward stream")]
    note_forward(SyncCopyEngine())  # a copier without streams has nothing to wait for
    assert recorded == ["forward stream"]
