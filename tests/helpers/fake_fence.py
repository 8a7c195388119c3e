"""Copy engines and streams under the test's control: late, lost, torn and failing copies, in any
order, without threads or a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vtoken_sglang.core.types import CopyFailedError
from vtoken_sglang.kernels.copy_slots import copy_slots

Slots = npt.NDArray[np.int64]


@dataclass
class ManualCopy:
    """One submitted copy, and its fence. Nothing happens until the test says so."""

    buffers: Sequence[torch.Tensor]
    src: Slots
    dst: Slots
    over: bool = False
    failed: bool = False

    def run(self, first: int = 0, last: int | None = None) -> None:
        """Copy tokens [first, last) now, from whatever the sources hold now."""
        src, dst = torch.from_numpy(self.src[first:last]), torch.from_numpy(self.dst[first:last])
        copy_slots(self.buffers, src, dst)

    def run_one_buffer(self) -> None:
        """Copy one buffer only: torn over the layers."""
        copy_slots(self.buffers[:1], torch.from_numpy(self.src), torch.from_numpy(self.dst))

    def finish(self) -> None:
        """Copy everything; the copy is over."""
        self.run()
        self.over = True

    def wait(self, timeout: float) -> bool:
        """A test waits for no one: what has not run, runs now."""
        if self.failed:
            raise CopyFailedError("the worker failed")
        if not self.over:
            self.finish()
        return True


class ManualCopyEngine:
    """Keeps every submitted copy for the test to run, lose, tear or fail."""

    def __init__(self) -> None:
        self.copies: list[ManualCopy] = []

    def submit(self, buffers: Sequence[torch.Tensor], src_slots: Slots, dst_slots: Slots) -> Any:
        copy = ManualCopy(buffers, src_slots, dst_slots)
        self.copies.append(copy)
        return copy

    @property
    def waiting(self) -> list[ManualCopy]:
        return [copy for copy in self.copies if not copy.over and not copy.failed]


@dataclass
class RecordedStreams:
    """Stands in for `torch.cuda`: logs what is asked of streams and events, in order."""

    log: list[str] = field(default_factory=list)
    current: str = "schedule"
    made: int = 0

    def Stream(self) -> "RecordedStream":
        return RecordedStream(self, "copy")

    def current_stream(self) -> "RecordedStream":
        return RecordedStream(self, self.current)

    def Event(self) -> "RecordedEvent":
        self.made += 1
        return RecordedEvent(self, f"event{self.made}")

    @contextmanager
    def stream(self, stream: "RecordedStream") -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before


@dataclass
class RecordedStream:
    api: RecordedStreams
    name: str

    def wait_event(self, event: "RecordedEvent") -> None:
        self.api.log.append(f"{self.name} waits {event.name}")


@dataclass
class RecordedEvent:
    api: RecordedStreams
    name: str

    def record(self, stream: RecordedStream) -> None:
        self.api.log.append(f"{stream.name} records {self.name}")
