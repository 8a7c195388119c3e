"""Copy engines, fences, and what orders them."""

import threading
import weakref
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.helpers.fake_fence import RecordedEvent, RecordedStreams
from vtoken_sglang.core.copy_engine import StreamCopyEngine, SyncCopyEngine, ThreadCopyEngine
from vtoken_sglang.core.types import CopyFailedError

SRC, DST = np.array([3, 5, 6]), np.array([10, 11, 12])


def some_buffers() -> list[torch.Tensor]:
    return [torch.randn(16, 2, 4), torch.randn(16, 1, 8).to(torch.bfloat16)]


@pytest.mark.parametrize("engine_class", [SyncCopyEngine, ThreadCopyEngine])
def test_engines_copy_every_buffer(engine_class: type) -> None:
    engine, buffers = engine_class(), some_buffers()
    before = [buffer.clone() for buffer in buffers]
    assert engine.submit(buffers, SRC, DST).wait(10.0)
    for buffer, old in zip(buffers, before, strict=True):
        assert buffer[DST].equal(old[SRC])
        assert buffer[:10].equal(old[:10])


class GatedCopy:
    """A copy that waits for the test inside the worker."""

    def __init__(self) -> None:
        self.started, self.gate = threading.Event(), threading.Event()
        self.threads: list[int] = []

    def __call__(
        self, buffers: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor
    ) -> None:
        self.threads.append(threading.get_ident())
        self.started.set()
        assert self.gate.wait(10.0)


def test_the_scheduler_goes_on_while_the_worker_copies() -> None:
    copy = GatedCopy()
    engine = ThreadCopyEngine(copy)
    first, second = (engine.submit(some_buffers(), SRC, DST) for _ in range(2))
    assert copy.started.wait(10.0)
    assert not first.wait(0.0)
    assert not second.wait(0.0)
    copy.gate.set()
    assert first.wait(10.0)
    assert second.wait(10.0)
    assert threading.get_ident() not in copy.threads


def test_a_worker_failure_is_raised_by_every_wait_and_the_worker_goes_on() -> None:
    calls: list[int] = []

    def copy(buffers: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
        calls.append(len(src))
        if len(calls) == 1:
            raise MemoryError("no room")

    engine = ThreadCopyEngine(copy)
    bad, good = engine.submit([], SRC, DST), engine.submit([], SRC, DST)
    assert good.wait(10.0)
    for _ in range(2):
        with pytest.raises(CopyFailedError, match="no room") as caught:
            bad.wait(1.0)
    assert isinstance(caught.value.__cause__, MemoryError)


def recording_engine() -> tuple[StreamCopyEngine, RecordedStreams]:
    streams = RecordedStreams()

    def copy(buffers: Sequence[torch.Tensor], src: torch.Tensor, dst: torch.Tensor) -> None:
        streams.log.append(f"{streams.current} copies {src.tolist()} to {dst.tolist()}")

    return StreamCopyEngine(torch.device("cpu"), streams=streams, copy=copy), streams


def test_the_stream_waits_for_the_last_forward_before_it_copies() -> None:
    engine, streams = recording_engine()
    for name in ("forward7", "forward8"):
        engine.note_forward(RecordedEvent(streams, name))
    engine.submit(some_buffers(), SRC, DST)
    assert streams.log == [
        "copy waits forward8",
        "copy copies [3, 5, 6] to [10, 11, 12]",
        "copy records event1",
    ]
    assert streams.current == "schedule"


def test_each_copy_waits_for_the_forward_launched_last_and_has_its_own_event() -> None:
    engine, streams = recording_engine()
    engine.note_forward(RecordedEvent(streams, "forward1"))
    first = engine.submit(some_buffers(), SRC, DST)
    engine.note_forward(RecordedEvent(streams, "forward2"))
    second = engine.submit(some_buffers(), SRC, DST)
    waits = [line for line in streams.log if "waits" in line]
    assert waits == ["copy waits forward1", "copy waits forward2"]
    streams.log.clear()
    assert second.wait(0.0)
    assert first.wait(0.0)
    assert streams.log == ["schedule waits event2", "schedule waits event1"]


def test_an_event_fence_keeps_its_inputs_as_long_as_it_lives() -> None:
    engine, streams = recording_engine()
    engine.note_forward(RecordedEvent(streams, "forward1"))
    src = SRC.copy()
    kept = weakref.ref(src)
    fence = engine.submit(some_buffers(), src, DST)
    del src
    assert kept() is not None
    del fence
    assert kept() is None


def test_a_copy_without_a_noted_forward_is_refused() -> None:
    engine, streams = recording_engine()
    with pytest.raises(CopyFailedError, match="no forward"):
        engine.submit(some_buffers(), SRC, DST)
    assert streams.log == []
