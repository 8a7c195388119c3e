"""Copy engines: move K/V rows beside the scheduler, in order of submission.

The sources are sealed: nobody writes them until the commit. The destinations are held: nobody else
touches them until the step at which the copy is due, which waits for its fence. So a copy races
with nothing, as long as it starts after the last launched forward, which may still write (an
overshoot of a finished request) or read the pages that were just handed out as destinations. On a
CPU every forward is over before the scheduler goes on.

    forward stream   ... forward N ──record──▶ event E
    copy stream          wait E ▶ index upload ▶ copy_slots ──record──▶ fence
    current stream, LAG steps later                                     wait fence ▶ row writes

On a CUDA device one wait on the last launched forward closes every race (DESIGN 3.5): sources were
written by it or an earlier forward; destinations fresh from the free list may still be read, or be
written by the overshoot of a finished request, by it or an earlier forward, and by none launched
later. Small work behind it that reads keys (`core.device_work`) is noted too, as part of it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeAlias

import torch

from vtoken_sglang.core.device_work import StreamApi
from vtoken_sglang.core.types import CopyFailedError, Int64Array
from vtoken_sglang.kernels.copy_slots import copy_slots

CopyFunction: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]


class Fence(Protocol):
    """End of one submitted copy."""

    def wait(self, timeout: float) -> bool:
        """Whatever the caller does after this, on the host or on its current stream, comes after
        the copy. False if the copy is not over after `timeout` seconds. Raises CopyFailedError,
        every time it is asked, if the destinations do not hold the bytes."""


class CopyEngine(Protocol):
    """Copies rows of K/V buffers."""

    def submit(
        self, buffers: Sequence[torch.Tensor], src_slots: Int64Array, dst_slots: Int64Array
    ) -> Fence:
        """Start `buffer[dst_slots[i]] = buffer[src_slots[i]]` for every buffer and i.

        `buffers`: [num_slots, heads, dim] each. Slots: host int64 [n], n >= 1, sources and
        destinations disjoint, destinations distinct. The caller holds both until it has waited for
        the fence and does not write to the arrays any more. Raises CopyFailedError if it cannot
        start.
        """


class HostFence:
    """End of a copy on the CPU."""

    def __init__(self, copy: Future[None]) -> None:
        self._copy = copy

    def wait(self, timeout: float) -> bool:
        if not wait([self._copy], timeout).done:
            return False
        if (failure := self._copy.exception()) is not None:
            raise CopyFailedError(f"copy worker failed: {failure!r}") from failure
        return True


class SyncCopyEngine:
    """Copies inside `submit`: no overlap with anything. The ablation, and the simplest truth."""

    def __init__(self, copy: CopyFunction = copy_slots) -> None:
        self._copy = copy

    def submit(
        self, buffers: Sequence[torch.Tensor], src_slots: Int64Array, dst_slots: Int64Array
    ) -> Fence:
        self._copy(buffers, torch.from_numpy(src_slots), torch.from_numpy(dst_slots))
        done: Future[None] = Future()
        done.set_result(None)
        return HostFence(done)


class ThreadCopyEngine:
    """One worker thread copies while the scheduler goes on (CPU).

    torch releases the interpreter lock inside its copies. A failure is raised by the fence of the
    copy that failed; later copies still run.
    """

    def __init__(self, copy: CopyFunction = copy_slots) -> None:
        self._copy = copy
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vtoken-copy")

    def submit(
        self, buffers: Sequence[torch.Tensor], src_slots: Int64Array, dst_slots: Int64Array
    ) -> Fence:
        src, dst = torch.from_numpy(src_slots), torch.from_numpy(dst_slots)
        return HostFence(self._worker.submit(self._copy, buffers, src, dst))


class StreamFence:
    """End of a copy on a device stream: its event, and what must outlive the copy."""

    def __init__(self, streams: StreamApi, event: Any, keep_alive: object) -> None:
        self._streams, self._event, self._keep_alive = streams, event, keep_alive

    def wait(self, timeout: float) -> bool:
        """Orders the current stream behind the copy; the host goes on, so it takes no time."""
        self._streams.current_stream().wait_event(self._event)
        return True


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
        self._last_forward: Any = None

    def note_forward(self, event: Any) -> None:
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
        return StreamFence(self._streams, event, (host, src, dst))
