"""Copies and small device work as the scheduler's device needs them, wired to SGLang's forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vtoken_sglang.core.copy_engine import (
    CopyEngine,
    StreamCopyEngine,
    SyncCopyEngine,
    ThreadCopyEngine,
)
from vtoken_sglang.core.device_work import DeviceWork, WorkAtOnce, WorkBehindForwards
from vtoken_sglang.errors import HookError
from vtoken_sglang.options import VTokenConfig

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def make_copy_engine(scheduler: Scheduler, config: VTokenConfig) -> CopyEngine:
    """Copies on the CPU run in a worker thread, or at once with `--vtoken-copy sync`.

    On CUDA they run on a stream of their own, behind an event recorded after every launched
    forward (patch `forward-done-listener`). `sync` there is a matter of when the commit happens,
    not of the stream, so it is the runtime that settles at once.

    Raises:
        HookError: CUDA without the patched call-out, or with another listener on it.
    """
    device = torch.device(scheduler.token_to_kv_pool_allocator.device)
    if device.type != "cuda":
        return SyncCopyEngine() if config.copy == "sync" else ThreadCopyEngine()
    engine = StreamCopyEngine(device)
    owner = type(scheduler)
    if getattr(owner, "forward_done_listener", engine) is not None:
        raise HookError("forward-done-listener", "is missing or taken by another plugin")
    _compile_kernels(scheduler)

    def note(_scheduler: Scheduler, _batch: Any) -> None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        engine.note_forward(event)

    owner.forward_done_listener = note
    return engine


def make_device_work(scheduler: Scheduler, copier: object = None) -> DeviceWork:
    """What fits the scheduler's device. `copier`: the engine whose copies must not overtake it."""
    if torch.device(scheduler.token_to_kv_pool_allocator.device).type != "cuda":
        return WorkAtOnce()
    forward_stream = scheduler.forward_stream if scheduler.enable_overlap else None
    return WorkBehindForwards(forward_stream, note=getattr(copier, "note_forward", None))


def _compile_kernels(scheduler: Scheduler) -> None:
    """Triton compiles at the first launch: here, not in the first safe point that moves a token."""
    from vtoken_sglang.kernels.copy_slots.triton import warm_up

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    warm_up([*pool.k_buffer, *pool.v_buffer])
