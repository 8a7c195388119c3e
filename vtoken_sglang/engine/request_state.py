"""Everything that is kept of one request while it has a row.

Made once, when the request is first seen with its row (`Runtime.state_of`), and dropped once, when
the row goes back to SGLang (finish, abort, retraction). Each group of fields has one room that
writes it; the others may read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vtoken_sglang.core.device_work import Arriving
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Generation, Int64Array, Row
from vtoken_sglang.options import RequestOptions
from vtoken_sglang.policy.base import Observation, Policy

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo


@dataclass(frozen=True, slots=True)
class PendingSelection:
    """Evicted positions on their way to the host.

    Fields:
        policy: that chose them. found: int64, those of every request asked in the same pass.
        start, end: this request's part of it. due: the pass that takes it.
    """

    policy: Policy
    found: Arriving
    start: int
    end: int
    due: int


@dataclass(slots=True)
class Watched:
    """One request whose attention is gathered.

    Fields:
        observation: what its policy asks for.
        score_rows: rows of the score table, 1 or more each.
        observed_len: no observed query saw positions from here on.
        block: newest block of the history window that has a row; -1 before the first.
        prompt_ended: the queries at the end of the prompt were seen.
        blocks: names of its prompt's blocks, for `prefix_scores`; empty for none.
        first_own: first block whose queries this request computed itself.
        kept: its scores were kept for others, or never will be.
    """

    observation: Observation
    score_rows: tuple[int, ...]
    observed_len: int = 0
    block: int = -1
    prompt_ended: bool = False
    blocks: list[bytes] = field(default_factory=list)
    first_own: int = 0
    kept: bool = False


@dataclass(slots=True)
class ForkRecord:
    """One fork that was started, for the log.

    Fields:
        rid: the request. reason: what decided. tokens: live tokens copied.
        predicted_pages: pages saved by the rule's count.
        realised_pages: pages that became evictable when the lock moved, less pages taken; None
            until then, and for a fork that was given up.
    """

    rid: str
    reason: str
    tokens: int
    predicted_pages: float
    taken_pages: int
    realised_pages: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState:
    """One request with a row.

    Fields:
        request, record: SGLang's request and its KV record; the record is its identity.
        row, generation: its row, and SGLang's count of the row's uses.
        options, policy: what holds for it; no policy: nothing of it is evicted.
        prompt_interval: tokens between two evictions from its private prompt while that is
            computed, page multiple; 0: none before the prompt's end.
        table: where its tokens are; None while nothing of it was evicted.
        evicted_at: logical length when its policy was last asked; 0 before the first time.
        skipped: int64, ascending runs; tree-owned positions that count as evicted and are left
            alone (strategy `skip`).
        selection: evicted tokens on their way from the device.
        failed: its policy did, so it is being ended and not asked again.
        released: its pages went back to SGLang; nothing of it may be freed again.
        watched: its attention scores; None while nothing of it is observed.
        unobserved: no score row was free when it came, so nothing of it ever is.
        tree_pages: int64, ids of the tree-owned pages that its lock covers, in row order; None
            before they were read.
        fork: its copy-on-write in flight.
        fork_considered: the fork rule was asked before.
        fork_wanted: pages of a fork that would pay, had the pool as many; None when none is wanted.
    """

    request: Req
    record: ReqKvInfo
    row: Row
    generation: Generation
    options: RequestOptions
    policy: Policy | None
    prompt_interval: int = 0
    # runtime
    table: TokenTable | None = None
    evicted_at: int = 0
    skipped: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    selection: PendingSelection | None = None
    failed: bool = False
    released: bool = False
    # observe
    watched: Watched | None = None
    unobserved: bool = False
    # sharing
    tree_pages: Int64Array | None = None
    fork: ForkRecord | None = None
    fork_considered: bool = False
    fork_wanted: int | None = None

    def live_positions(self, length: int) -> Int64Array:
        """Live positions below `length`, ascending; those past the table's end are alive."""
        positions = np.arange(length, dtype=np.int64)
        if self.table is None:
            return positions
        known = min(length, self.table.logical_len)
        alive = self.table.alive(positions[:known])
        return np.concatenate([positions[:known][alive], positions[known:]])

    def live_len(self, length: int) -> int:
        """How many they are, without listing them."""
        return length if self.table is None else length - self.table.evicted

    def counted_positions(self, length: int) -> Int64Array:
        """Positions below `length` that the policy counts as alive: those it decided to evict are
        not, whether or not strategy `skip` left them in place."""
        positions = self.live_positions(length)
        if not len(self.skipped):
            return positions
        return positions[~np.isin(positions, self.skipped)]
