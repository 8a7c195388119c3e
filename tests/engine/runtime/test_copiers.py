"""The copy engine of CUDA: kernels compiled at start, every forward noted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")
pytest.importorskip("triton", reason="needs Triton")

from vtoken_sglang.engine.runtime import copiers
from vtoken_sglang.engine.runtime.copiers import make_copy_engine
from vtoken_sglang.errors import HookError
from vtoken_sglang.kernels.copy_slots import triton as triton_copy_slots
from vtoken_sglang.options import VTokenConfig


def scheduler_of(listener: object) -> Any:
    """A scheduler on CUDA as far as it is read; its tensors are not."""
    kind = type("Scheduler", (), {"forward_done_listener": listener})
    scheduler: Any = kind()
    pool = SimpleNamespace(k_buffer=[torch.zeros(4, 1, 2)], v_buffer=[torch.ones(4, 1, 2)])
    scheduler.token_to_kv_pool_allocator = SimpleNamespace(device="cuda", get_kvcache=lambda: pool)
    return scheduler


def test_kernels_are_compiled_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr(copiers, "StreamCopyEngine", lambda device: SimpleNamespace())
    monkeypatch.setattr(triton_copy_slots, "warm_up", warmed.append)
    scheduler = scheduler_of(None)
    make_copy_engine(scheduler, VTokenConfig(policy="random", keep=0.5))
    (buffers,) = warmed
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    own = [*pool.k_buffer, *pool.v_buffer]
    assert len(buffers) == len(own)
    assert all(each is other for each, other in zip(buffers, own, strict=True))
    assert type(scheduler).forward_done_listener is not None


def test_a_taken_call_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copiers, "StreamCopyEngine", lambda device: SimpleNamespace())
    with pytest.raises(HookError, match="taken by another plugin"):
        make_copy_engine(scheduler_of(print), VTokenConfig(policy="random", keep=0.5))
