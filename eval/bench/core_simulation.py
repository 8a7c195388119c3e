"""What free and repack leave over, simulated: policies evict from requests that exist only as
counters, on the real core. No model, no K/V bytes; served figures come from `eval`.

Every request starts with a prompt, decodes to its end, and is pruned every `INTERVAL` tokens down
to `keep` of its length, first tokens and recent ones kept. The naive arm makes the same evictions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vtoken_sglang.core.copy_engine import SyncCopyEngine
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Generation, Int64Array, ReclaimSettings, Row, page_count

PROMPT, OUTPUT = 1024, 1024
SINK, RECENT, INTERVAL = 4, 64, 8
POLICIES = ("random", "streaming_llm")


class CountingPool:
    """Page pool over an array used as a stack."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._stack = np.arange(pages, 0, -1, dtype=np.int64)
        self._free = pages

    def free_pages(self) -> int:
        return self._free

    def allocate(self, pages: int) -> Int64Array | None:
        if pages > self._free:
            return None
        self._free -= pages
        return self._stack[self._free : self._free + pages].copy()

    def release(self, pages: Int64Array) -> None:
        self._stack[self._free : self._free + len(pages)] = pages
        self._free += len(pages)


class Requests:
    """Rows that grow as the engine's do, driven in lockstep.

    Fields:
        length: positions of every row.
    """

    def __init__(
        self, count: int, *, page_size: int, length: int, grow: int, settings: ReclaimSettings
    ) -> None:
        self.page_size, self.length = page_size, length
        width = length + grow + page_size
        # Spare pages for destinations: a repack takes at most half of what it empties.
        self.pool = CountingPool(2 * count * page_count(width, page_size) + 64, page_size)
        self.table = torch.zeros(count + 1, width, dtype=torch.int32)
        self._host = self.table.numpy()
        self.reclaimer = Reclaimer(
            rows=RequestRows(self.table),
            buffers=[torch.zeros(1, 1, 1)],
            pool=self.pool,
            copier=SyncCopyEngine(lambda buffers, src, dst: None),
            settings=settings,
        )
        self.rows = [Row(row) for row in range(1, count + 1)]
        for row in self.rows:
            self._fill(row, 0, length)
            self.reclaimer.open(row, Generation(1), None, 0, length)

    def _fill(self, row: Row, start: int, end: int) -> None:
        size = self.page_size
        pages = self.pool.allocate(page_count(end - start, size))
        assert pages is not None
        slots = (pages[:, None] * size + np.arange(size)).ravel()
        self._host[row, start:end] = slots[: end - start]

    def append(self) -> None:
        """One token for every row, by the engine's rules."""
        pos, size = self.length, self.page_size
        if pos % size:
            self._host[1:, pos] = self._host[1:, pos - 1] + 1
        else:
            pages = self.pool.allocate(len(self.rows))
            assert pages is not None
            self._host[1:, pos] = pages * size
        self.length += 1

    @property
    def open_start(self) -> int:
        return (self.length - 1) // self.page_size * self.page_size

    def sealed(self) -> dict[Row, int]:
        return dict.fromkeys(self.rows, self.open_start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Averages over all requests and pruning moments of one simulated arm.

    Fields:
        retained: private pages per request.
        waste: F over them, the tail page included.
        waste_after: F at the moments right after a commit; NaN if there was none.
        limit_gap: retained / ceil(live / page_size) - 1, right after a commit or, without any, at
            every moment.
    """

    retained: float
    waste: float
    waste_after: float
    limit_gap: float


def evicted(
    policy: str, live: npt.NDArray[np.intp], keep: int, random: np.random.Generator
) -> Int64Array:
    """Positions to evict so that `keep` stay; sinks and recent tokens are never chosen."""
    free = live[SINK:-RECENT]
    excess = min(len(live) - keep, len(free))
    if excess <= 0:
        return np.zeros(0, np.int64)
    if policy == "random":
        return np.sort(random.choice(free, excess, replace=False)).astype(np.int64)
    return free[:excess].astype(np.int64)


def waste_of(table: TokenTable) -> float:
    """F = 1 - mean(live / page_size) over the retained private pages, the tail included."""
    places = table.ledger.pages_held * table.page_size
    return 1.0 - table.ledger.live_tokens / places if places else 0.0


def simulate(
    policy: str, *, keep: float, page_size: int, reclaim: bool, count: int, seed: int
) -> Outcome:
    """One arm; `count` requests. Same seed, same evictions in both arms."""
    requests = Requests(
        count,
        page_size=page_size,
        length=PROMPT + 1,
        grow=OUTPUT,
        settings=ReclaimSettings(reclaim=reclaim),
    )
    core, random = requests.reclaimer, np.random.default_rng(seed)
    retained, waste, after, gaps, gaps_after = [], [], [], [], []
    for step in range(OUTPUT - 1):
        for row in requests.rows:
            core.sync_new_tokens(row, requests.length)
        if step % INTERVAL == 0:
            for row in requests.rows:
                entries = requests.table[row, : requests.length].numpy()
                chosen = evicted(
                    policy, np.flatnonzero(entries), round(keep * requests.length), random
                )
                core.evict_tokens(row, chosen[chosen < requests.open_start])
        in_flight = dict(core.copies.pending)
        core.step(sealed_upto=requests.sealed())
        for row in requests.rows:
            table = core.table(row)
            assert table is not None
            pages = table.ledger.pages_held
            gap = pages / page_count(table.live_len, page_size) - 1
            retained.append(core.private_pages(row))
            waste.append(waste_of(table))
            gaps.append(gap)
            if row in in_flight and core.copies.pending.get(row) is not in_flight[row]:
                after.append(waste_of(table))
                gaps_after.append(gap)
        requests.append()
    return Outcome(
        retained=float(np.mean(retained)),
        waste=float(np.mean(waste)),
        waste_after=float(np.mean(after)) if after else float("nan"),
        limit_gap=float(np.mean(gaps_after or gaps)),
    )
