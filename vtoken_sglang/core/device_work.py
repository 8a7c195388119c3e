"""Small device work of the scheduler thread, in the order of the forwards; the host never waits.

    safe point   schedule stream: row writes ──▶ forward stream: forward N ▶ work ▶ copy to pinned
    later        `lag` safe points on, the result is on the host

Work runs on the stream of the forwards, behind the last launched one and before the next: it sees
every key and score of the forwards up to here and none of a later one, and no page that it reads
can be written meanwhile. Off CUDA everything is done at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from numpy.typing import NDArray

from vtoken_sglang.core.types import LAG


class Arriving(Protocol):
    """A result on its way to the host."""

    def take(self) -> NDArray[Any]:
        """The result; waits for it where it is not there yet."""


class DeviceWork(Protocol):
    """Where device work is started.

    Fields:
        lag: safe points after which a result is taken, whether or not it came earlier, so that when
            it takes effect depends on no timing. By then the forward that the work followed has
            been processed, so that taking it does not wait.
    """

    lag: int

    def start(self, work: Callable[[], torch.Tensor]) -> Arriving:
        """Enqueue `work` and the copy of its result to the host."""


class _Here:
    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def take(self) -> NDArray[Any]:
        values: NDArray[Any] = self._values.numpy()
        return values


class WorkAtOnce:
    """For tensors on the CPU."""

    lag = 0

    def start(self, work: Callable[[], torch.Tensor]) -> Arriving:
        return _Here(work())


class StreamApi(Protocol):
    """The calls of `torch.cuda` that the core uses."""

    def Stream(self) -> Any: ...

    def Event(self) -> Any: ...

    def current_stream(self) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


class _OnItsWay:
    def __init__(self, event: Any, host: torch.Tensor, source: torch.Tensor) -> None:
        # `source` must outlive the copy, not only the call that started it.
        self._event, self._host, self._source = event, host, source

    def take(self) -> NDArray[Any]:
        self._event.synchronize()
        values: NDArray[Any] = self._host.numpy()
        return values


class WorkBehindForwards:
    """For CUDA: work on the stream that forwards are launched on.

    Args:
        forward_stream: SGLang's stream of the forwards; None when they run on the current one
            (overlap off).
        note: told of the event behind each piece of work. Copies wait for the last one they know
            of: work that still reads keys must be over before a copy writes to pages that the
            same safe point set free.
    """

    lag = LAG

    def __init__(
        self,
        forward_stream: Any,
        streams: StreamApi = torch.cuda,
        note: Callable[[Any], None] | None = None,
    ) -> None:
        self._forward_stream = forward_stream
        self._streams = streams
        self._note = note

    def start(self, work: Callable[[], torch.Tensor]) -> Arriving:
        current = self._streams.current_stream()
        stream = current if self._forward_stream is None else self._forward_stream
        if stream is not current:
            stream.wait_stream(current)  # row writes of this safe point
        with self._streams.stream(stream):
            found = work()
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.is_cuda)
            host.copy_(found, non_blocking=True)
            event = self._streams.Event()
            event.record(stream)
        if self._note is not None:
            self._note(event)
        return _OnItsWay(event, host, found)
