"""The tensor-parallel ranks that run one scheduler's batches, and what keeps them equal.

Each rank has its own scheduler, rows, allocator and tree, and must decide the same in the same
step: a page freed one step earlier on one rank admits another batch there, and the next collective
of the model does not fit. Three rules see to that:

    lag     what is started at a safe point (a copy, a selection on the device, a read) takes effect
            a fixed number of safe points later, ordered by an event, never when it happens to have
            finished (`core`, `eviction_pass`)
    mean    what is chosen by is averaged over the ranks' heads first
    digest  decisions are hashed, and the ranks stop at the first difference, all of them, instead
            of answering wrongly or waiting for a collective that does not come

One rank alone needs none of it and pays for none of it.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from vtoken_sglang.errors import HookError, InvariantError

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.managers.scheduler import Scheduler

COMPARED_EVERY: Final = 16
"""Working safe points between two comparisons of digests, without `--vtoken-check`."""
NOTED: Final = 32
"""Decisions shown when the ranks differ."""


class Ranks:
    """The ranks of one scheduler's batches, seen from one of them. Scheduler thread only.

    Fields:
        count, index: how many there are, and which this one is.
        sums, compared: collectives so far, on the device and on the host.
        summed_bytes: bytes that this rank put into the former.
    """

    def __init__(self, group: GroupCoordinator | None = None) -> None:
        """`group`: SGLang's coordinator of the ranks; None: one rank alone."""
        self._group = group
        self.count = 1 if group is None else int(group.world_size)
        self.index = 0 if group is None else int(group.rank_in_group)
        self._digest = 0
        self._steps = 0
        self._noted: list[str] = []
        self.sums = self.compared = self.summed_bytes = 0

    @classmethod
    def of(cls, scheduler: Scheduler) -> Ranks:
        """Those that share the scheduler's batches: the attention-TP ranks of its DP replica."""
        group = scheduler.dp_tp_group
        return cls(group if group.world_size > 1 else None)

    def mean(self, scores: torch.Tensor) -> torch.Tensor:
        """Average float32 scores over the ranks, on the current stream; every rank gets the same
        bits. NaN on one rank is NaN on all. Every rank must come here in the same step."""
        if self._group is None:
            return scores
        torch.distributed.all_reduce(scores, group=self._group.device_group)
        self.sums += 1
        self.summed_bytes += scores.numel() * scores.element_size()
        return scores / self.count

    def note(self, what: str, *decision: Any) -> None:
        """A decision that every rank must take alike: what it is about, and its values."""
        if self._group is None:
            return
        values = [d.tolist() if isinstance(d, np.ndarray) else d for d in decision]
        text = f"{what} {values}"
        self._digest = zlib.crc32(text.encode(), self._digest)
        self._noted = [*self._noted[1 - NOTED :], text[:120]]

    def worked(self, every_step: bool) -> None:
        """A safe point did something: compare digests now, or every few of them.

        Raises:
            InvariantError: the ranks decided differently, on every rank; the last decisions of
                each are named.
        """
        if self._group is None:
            return
        self._steps += 1
        if every_step or self._steps % COMPARED_EVERY == 0:
            self.compare()

    def compare(self) -> None:
        """One small collective on the host; see `worked`."""
        if self._group is None:
            return
        # The minimum of d and of -d: both are one rank's own only if all are equal.
        both = torch.tensor([self._digest, -self._digest], dtype=torch.int64)
        torch.distributed.all_reduce(
            both, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group
        )
        self.compared += 1
        if int(both[0]) == -int(both[1]):
            self._noted.clear()
            return
        noted: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(noted, self._noted, group=self._group.cpu_group)
        raise InvariantError(f"ranks decided differently: {first_difference(noted)}")

    def agree_on_start(self, attestation: dict[str, str]) -> None:
        """Raise HookError unless every rank, of every node, runs the same version and options."""
        if self._group is None:
            return
        found: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(found, attestation, group=self._group.cpu_group)
        for rank, other in enumerate(found):
            if other != found[0]:
                differing = sorted(key for key in found[0] if other.get(key) != found[0][key])
                raise HookError(
                    "ranks",
                    f"rank {rank} was started with another {', '.join(differing)} than rank 0",
                    "start every node with the same package, flags and environment",
                )

    def trace_path(self, path: str | None) -> str | None:
        """Where this rank appends its decisions: the file itself for the first, then FILE.1, ..."""
        return path if path is None or self.index == 0 else f"{path}.{self.index}"

    def counters(self) -> dict[str, int]:
        """For `/server_info`."""
        return {
            "count": self.count,
            "sums": self.sums,
            "summed_bytes": self.summed_bytes,
            "compared": self.compared,
        }


def first_difference(noted: list[list[str]]) -> str:
    """The first decision in which the ranks' lists differ, as text."""
    for number in range(max(map(len, noted), default=0)):
        texts = [ours[number] if number < len(ours) else "nothing" for ours in noted]
        if len(set(texts)) > 1:
            return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
    return "before the decisions that are remembered"
