"""The copy engine that fits the device, and device work in the order of SGLang's forwards."""

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
from vtoken_sglang.options import VTokenConfig

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def make_copy_engine(scheduler: Scheduler, config: VTokenConfig) -> CopyEngine:
    """Copies on the CPU run in a worker thread, or at once with synchronous copies.

    On CUDA they run on a stream of their own, behind an event recorded after every launched
    forward (`note_forward`). Synchronous there is a matter of when the commit happens, not of the
    stream, so it is the runtime that settles at once.
    """
    device = torch.device(scheduler.token_to_kv_pool_allocator.device)
    if device.type != "cuda":
        return SyncCopyEngine() if config.copy == "sync" else ThreadCopyEngine()
    _compile_kernels(scheduler)
    return StreamCopyEngine(device)


def note_forward(copier: CopyEngine) -> None:
    """Tell a copier on CUDA that a forward was launched on the current stream."""
    note = getattr(copier, "note_forward", None)
    if note is not None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        note(event)


def make_device_work(scheduler: Scheduler, copier: CopyEngine) -> DeviceWork:
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
