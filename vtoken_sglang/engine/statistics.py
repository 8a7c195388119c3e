"""Counters of one scheduler, and the optional trace of eviction decisions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from vtoken_sglang.core.types import StepReport


@dataclass(slots=True)
class Statistics:
    """Totals since start-up; never reset.

    Fields:
        pruned_requests: requests that lost at least one token.
        evicted_tokens: tokens evicted, tree-owned ones included.
        freed_pages: pages given back early, with or without a copy.
        taken_pages: destination pages taken by repacks.
        moved_tokens: tokens copied by committed repacks.
        repacks: committed plans. dropped_plans: plans given up (stale, ended, torn).
        early_evictions: looks for evicted before the interval was up, because the pool was short.
        admitted_by_pruning: requests admitted that would have waited if each was charged its
            whole length.
        outgrown_requests: requests accepted that may become longer than the pool.
        stalled_chunks: passes in which a prompt's next chunk found no room and waited.
        retractions: requests taken back by SGLang. retractions_avoided: decode steps that would
            have taken requests back, without the pages that looks ahead of time returned since
            the pool ran short.
        policy_errors: requests that a policy's error ended.
        trace: where each decision is written as one JSON line; None for no trace.
    """

    pruned_requests: int = 0
    evicted_tokens: int = 0
    freed_pages: int = 0
    taken_pages: int = 0
    moved_tokens: int = 0
    repacks: int = 0
    dropped_plans: int = 0
    early_evictions: int = 0
    admitted_by_pruning: int = 0
    outgrown_requests: int = 0
    stalled_chunks: int = 0
    retractions: int = 0
    retractions_avoided: int = 0
    policy_errors: int = 0
    trace: TextIO | None = field(default=None, repr=False)

    @classmethod
    def with_trace(cls, path: str | None) -> Statistics:
        """Fresh counters; each decision is appended to the file `path` as well, if there is one."""
        if path is None:
            return cls()
        return cls(trace=open(path, "a", encoding="utf-8"))

    def add_eviction(self, rid: str, logical_len: int, evicted: NDArray[np.int64]) -> None:
        """Count one eviction: `evicted` (logical positions) went when the request had
        `logical_len` tokens, so every later query, position >= logical_len, misses them."""
        self.evicted_tokens += int(evicted.size)
        if self.trace is not None:
            line = {"rid": rid, "logical_len": logical_len, "evicted": evicted.tolist()}
            self.trace.write(json.dumps(line) + "\n")
            self.trace.flush()

    def add_step(self, report: StepReport) -> None:
        """Add what one safe point did."""
        self.freed_pages += report.freed_empty_pages + report.freed_source_pages
        self.taken_pages += report.taken_pages
        self.moved_tokens += report.moved_tokens
        self.repacks += report.committed
        self.dropped_plans += report.dropped

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: value for name, value in values if isinstance(value, int)}
