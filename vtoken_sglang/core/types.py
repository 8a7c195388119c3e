"""Words of the core, one meaning each, and the plain data that crosses its stages.

    row   the request's line in the engine's `req_to_token` table
    pos   logical token position inside a request (its RoPE position)
    slot  physical token index into every K/V buffer; slot 0 is the sink, never allocated,
          so a 0 in a row means "evicted"
    page  `page_size` consecutive slots, the unit the engine's allocator hands out; page 0 is
          the sink's page
    code  a table's own name of one page it holds: >= 0 for an original page, which the engine
          filled at that place in position order, < 0 for a compacted page, which a repack filled

Arrays of ids keep the same words: `positions`, `slots`, `pages`, `codes`.
"""

from dataclasses import dataclass
from typing import Any, Final, NewType, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from vtoken_sglang.errors import ConfigError, VTokenError

Row = NewType("Row", int)
Generation = NewType("Generation", int)

Int64Array: TypeAlias = npt.NDArray[np.int64]
Int32Array: TypeAlias = npt.NDArray[np.int32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
IntArray: TypeAlias = npt.NDArray[np.integer[Any]]

LAG: Final = 2
"""Safe points from the start of something on the side (a copy, a read) to its effect. By then the
forward that it waited for has been processed, so waiting for it costs nothing; and when it takes
effect follows from the calls alone, never from timing: ranks in lockstep agree."""

NEVER_REPACKED: Final = -1.0
"""Waste after the last repack where there was none, so that the hysteresis holds nothing back."""


def page_floor(length: int, page_size: int) -> int:
    """Greatest multiple of `page_size` that is not above `length` (both in tokens)."""
    return length - length % page_size


def page_count(length: int, page_size: int) -> int:
    """Pages needed for `length` tokens."""
    return -(-length // page_size)


class PositionError(VTokenError, ValueError):
    """A position may not be evicted or synchronised: unknown, or in the open tail page."""

    def __init__(self, what: str, rule: str, got: object) -> None:
        self.what, self.rule, self.got = what, rule, got
        super().__init__(f"{what}: {rule}, got {got!r}")


class CopyFailedError(VTokenError, RuntimeError):
    """A copy of K/V rows failed, or was asked for in a way that could lose bytes."""


class PagePool(Protocol):
    """The engine's page allocator, as the core sees it. Called in the scheduler thread at the safe
    point.

    Fields:
        page_size: slots per page.
    """

    @property
    def page_size(self) -> int: ...

    def free_pages(self) -> int:
        """Pages that `allocate` could hand out now."""

    def allocate(self, pages: int) -> Int64Array | None:
        """`pages` distinct page ids >= 1, int64; None, having changed nothing, if there are not
        enough."""

    def release(self, pages: Int64Array) -> None:
        """Take pages back; each was allocated by this pool and is held by no one else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimSettings:
    """When and how much the reclaimer works. Nothing below it reads options.

    Fields:
        threshold: a row is repacked when the waste of its sealed pages is above this share
            (the paper's trigger F > 0.25); in [0, 1].
        hysteresis: a row that was repacked waits until its waste has grown by this share since,
            under pressure too; in [0, 1]. Keeps a row from being repacked every step.
        merge: below the trigger, too, a row's emptiest pages are emptied when their tokens fit into
            one page: a copy of at most a page then returns at least a page, so over its life a
            row copies no more tokens that way than it loses to evictions.
        reclaim: False is the naive arm: evictions only mask, nothing is freed or moved.
        min_gain_pages: a repack must return at least this many pages more than it takes; >= 1.
        max_moved_tokens: tokens copied per step at most, all rows together; >= 1 (below a page,
            nothing is repacked).
        check: compare the bytes of every moved token before the commit (slow, for tests and
            `--vtoken-check`).
    """

    threshold: float = 0.25
    hysteresis: float = 0.05
    merge: bool = True
    reclaim: bool = True
    min_gain_pages: int = 1
    max_moved_tokens: int = 16384
    check: bool = False

    def __post_init__(self) -> None:
        for field in ("threshold", "hysteresis"):
            value = getattr(self, field)
            if not 0.0 <= value <= 1.0:
                raise ConfigError(field, "a share between 0 and 1", value)
        for field in ("min_gain_pages", "max_moved_tokens"):
            value = getattr(self, field)
            if value < 1:
                raise ConfigError(field, "at least 1", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackPlan:
    """Move every live token of some pages of one row into new private pages.

    A repack empties sealed private pages into fewer ones. A fork (copy-on-write) copies live tokens
    out of tree-owned pages, which stay as they are: it has no source pages of its own to free.

    Token i of the plan (in ascending position order) goes to place i of the destinations, page
    after page, so every destination is full except perhaps the last.

    Fields:
        row, generation, record: identity of the request when the plan was made; all three must
            still hold at the commit.
        page_size: tokens per page.
        positions: int32 [n], ascending, the tokens that were alive.
        src_slots: int32 [n], where each token's K/V is.
        source_codes: int32 [s], the table's names of the pages that are emptied; none for a fork.
        source_pages: int64 [s], their page ids; they return to the pool at the commit.
        dst_pages: int64 [d], d < s unless it is a fork, taken from the pool when the plan is made
            and held until the step at which the copy is due.
        limited: a limit cut the plan short; the next step need not wait for the hysteresis.
        new_protected_len: where the tree-owned part of the row ends after a fork's commit (page
            multiple); None for a repack.
    """

    row: Row
    generation: Generation
    record: object
    page_size: int
    positions: Int32Array
    src_slots: Int32Array
    source_codes: Int32Array
    source_pages: Int64Array
    dst_pages: Int64Array
    limited: bool
    new_protected_len: int | None = None

    @property
    def dst_slots(self) -> Int64Array:
        """Where each token's K/V goes, int64 [n]: the places of `dst_pages`, page after page."""
        places = self.dst_pages[:, None] * self.page_size + np.arange(self.page_size)
        return places.ravel()[: len(self.positions)]

    @property
    def gain(self) -> int:
        """Pages the row holds less after the commit."""
        return len(self.source_pages) - len(self.dst_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one safe point did. All counts are of this step only, except the last.

    Forks count in `committed`, `dropped` and `moved_tokens` as repacks do.

    Fields:
        committed, dropped: plans whose commit took place / that were given up.
        moved_tokens: tokens whose row entry was set to a new slot.
        freed_empty_pages: pages given back because no token in them was alive.
        freed_source_pages: pages given back by commits.
        submitted, submitted_tokens, taken_pages: repacks started, their tokens, and the
            destination pages taken from the pool for them.
        forked: (row, new protected length) of every committed fork: the tree's pages above that
            length are no longer the row's, so the engine gives up its lock on them at once.
        given_up: rows of forks that were given up while their request runs on; it may try again.
        held_pages: destination pages held after this step, those of ended requests included.
    """

    committed: int = 0
    dropped: int = 0
    moved_tokens: int = 0
    freed_empty_pages: int = 0
    freed_source_pages: int = 0
    submitted: int = 0
    submitted_tokens: int = 0
    taken_pages: int = 0
    forked: tuple[tuple[Row, int], ...] = ()
    given_up: tuple[Row, ...] = ()
    held_pages: int = 0
