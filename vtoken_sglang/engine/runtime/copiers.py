"""The copy engine that fits the device, wired to SGLang's forwards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from vtoken_sglang.core.copy_engine import CopyEngine, SyncCopyEngine, ThreadCopyEngine
from vtoken_sglang.options import VTokenConfig

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def make_copy_engine(scheduler: Scheduler, config: VTokenConfig) -> CopyEngine:
    """Copies on the CPU run in a worker thread, or at once with `--vtoken-copy sync`.

    On CUDA they run on a stream of their own, behind an event recorded after every launched
    forward (`note_forward`). `sync` there is a matter of when the commit may happen, not of the
    stream, so it is the runtime that waits.
    """
    device = torch.device(scheduler.token_to_kv_pool_allocator.device)
    if device.type != "cuda":
        return SyncCopyEngine() if config.copy == "sync" else ThreadCopyEngine()
    from vtoken_sglang.core.stream_copy import StreamCopyEngine

    _compile_kernels(scheduler)
    return StreamCopyEngine(device)


def note_forward(copier: CopyEngine) -> None:
    """Tell a copier on CUDA that a forward was launched on the current stream."""
    note = getattr(copier, "note_forward", None)
    if note is not None:
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream())
        note(event)


def _compile_kernels(scheduler: Scheduler) -> None:
    """Triton compiles at the first launch: here, not in the first safe point that moves a token."""
    from vtoken_sglang.kernels import triton_apply_moves, triton_copy_slots

    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    triton_copy_slots.warm_up([*pool.k_buffer, *pool.v_buffer])
    triton_apply_moves.warm_up(scheduler.req_to_token_pool.req_to_token)
