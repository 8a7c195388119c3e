"""Copy engines: move K/V rows beside the scheduler, and say when it is over.

`submit` never blocks on the copy (except SyncCopyEngine, the ablation). The sources are sealed:
nobody writes them until the commit. The destinations are held: nobody else touches them until the
fence has passed. So a copy races with nothing, as long as it starts after the last launched
forward, which may still write (an overshoot of a finished request) or read the pages that were
just handed out as destinations. On a CPU every forward is over before the scheduler goes on.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

from vtoken_sglang.core.faults import CopyFailedError
from vtoken_sglang.core.fence import DoneFence, Fence, ThreadFence
from vtoken_sglang.core.types import Int64Array
from vtoken_sglang.kernels.copy_slots import copy_slots

CopyFunction: TypeAlias = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]


class CopyEngine(Protocol):
    """Copies rows of K/V buffers."""

    def submit(
        self, buffers: Sequence[torch.Tensor], src_slots: Int64Array, dst_slots: Int64Array
    ) -> Fence:
        """Start `buffer[dst_slots[i]] = buffer[src_slots[i]]` for every buffer and i.

        `buffers`: [num_slots, heads, dim] each. Slots: host int64 [n], n >= 1, sources and
        destinations disjoint, destinations distinct. The caller holds both until the fence passes
        and does not write to the arrays any more. Raises CopyFailedError if it cannot start.
        """

    def close(self) -> None:
        """Finish what was submitted and let go of threads. Safe to call twice."""


class SyncCopyEngine:
    """Copies inside `submit`: no overlap with anything. The ablation, and the simplest truth."""

    def __init__(self, copy: CopyFunction = copy_slots) -> None:
        self._copy = copy

    def submit(
        self, buffers: Sequence[torch.Tensor], src_slots: Int64Array, dst_slots: Int64Array
    ) -> Fence:
        device = buffers[0].device
        src, dst = torch.from_numpy(src_slots), torch.from_numpy(dst_slots)
        self._copy(buffers, src.to(device), dst.to(device))
        return DoneFence()

    def close(self) -> None:
        pass


class ThreadCopyEngine:
    """One worker thread copies, in order of submission, while the scheduler goes on (CPU).

    torch releases the interpreter lock inside its copies. A failure is kept in the fence of the
    copy that failed and raised by its next poll; later copies still run.
    """

    def __init__(self, copy: CopyFunction = copy_slots) -> None:
        self._copy = copy
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._worker = threading.Thread(target=self._run, name="vtoken-copy", daemon=True)
        self._worker.start()

    def submit(
        self, buffers: Sequence[torch.Tensor], src_slots: Int64Array, dst_slots: Int64Array
    ) -> Fence:
        if self._closed:
            raise CopyFailedError("submit: the copy engine is closed")
        fence = ThreadFence()
        src, dst = torch.from_numpy(src_slots), torch.from_numpy(dst_slots)

        def job() -> None:
            try:
                self._copy(buffers, src, dst)
            except BaseException as failure:
                fence.finish(failure)
            else:
                fence.finish(None)

        self._jobs.put(job)
        return fence

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._worker.join()
