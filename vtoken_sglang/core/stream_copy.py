"""Copy engine for CUDA devices: own stream, fenced by events, the host never waits.

    forward stream   ... forward N ──record──▶ event E
    copy stream          wait E ▶ index upload ▶ copy_slots ──record──▶ fence

One wait on the last launched forward closes every race (DESIGN 3.5): sources were written by it or
an earlier forward, and destinations fresh from the free list may still be read, or be written by
the overshoot of a finished request, by it or an earlier forward, and by none launched later.
Small work behind it that reads keys (`engine.device_work`) is noted too, as part of it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from vtoken_sglang.core.copy_engine import CopyFunction
from vtoken_sglang.core.faults import CopyFailedError
from vtoken_sglang.core.fence import DeviceEvent, EventFence, Fence
from vtoken_sglang.core.types import Int64Array
from vtoken_sglang.kernels.copy_slots import copy_slots


class StreamApi(Protocol):
    """The calls of `torch.cuda` that are used; tests pass a recorder instead."""

    def Stream(self) -> Any: ...

    def Event(self) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


class StreamCopyEngine:
    """Copies on its own device stream after the last launched forward.

    The glue calls `note_forward(event)` with an event recorded on the forward stream right after
    every launch. A submit before any note is refused: no forward, no K/V, so the wiring is wrong.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        streams: StreamApi = torch.cuda,
        copy: CopyFunction = copy_slots,
    ) -> None:
        self._device = device
        self._streams = streams
        self._copy = copy
        self._stream = streams.Stream()
        self._last_forward: DeviceEvent | None = None
        self._last_copy: EventFence | None = None

    def note_forward(self, event: DeviceEvent) -> None:
        """`event` was recorded on the forward stream after the forward launched last, or after work
        that followed it there."""
        self._last_forward = event

    def submit(
        self, buffers: Sequence[torch.Tensor], src_slots: Int64Array, dst_slots: Int64Array
    ) -> Fence:
        if self._last_forward is None:
            raise CopyFailedError("submit: no forward was noted, so the copy cannot be ordered")
        host = torch.from_numpy(src_slots), torch.from_numpy(dst_slots)
        if self._device.type == "cuda":
            host = host[0].pin_memory(), host[1].pin_memory()
        event = self._streams.Event()
        with self._streams.stream(self._stream):
            self._stream.wait_event(self._last_forward)
            src = host[0].to(self._device, non_blocking=True)
            dst = host[1].to(self._device, non_blocking=True)
            self._copy(buffers, src, dst)
            event.record(self._stream)
        # Upload sources and index tensors must outlive the copy, not only this call.
        fence = EventFence(event, (host, src, dst))
        self._last_copy = fence
        return fence

    def close(self) -> None:
        if self._last_copy is not None:
            self._last_copy.wait(timeout=60.0)
