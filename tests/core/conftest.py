"""Fixtures of the core's tests: one pruned request over marked memory, ready to be repacked."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tests.helpers.fake_fence import ManualCopyEngine
from tests.helpers.marked_rows import MarkedRows
from vtoken_sglang.core.commit import Identity
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import LAG, Generation, ReclaimSettings, Row, StepReport

ROW = Row(1)


@dataclass
class Bench:
    """A reclaimer over marked memory, with copies under the test's control.

    Fields:
        length: known positions of the request in row 1.
        written: position -> hash of what the engine wrote, for all its positions.
    """

    memory: MarkedRows
    copies: ManualCopyEngine
    reclaimer: Reclaimer
    length: int
    written: dict[int, bytes]

    @property
    def table(self) -> TokenTable:
        table = self.reclaimer.table(ROW)
        assert table is not None
        return table

    def sealed(self) -> dict[Row, int]:
        size = self.memory.page_size
        return {ROW: (self.length - 1) // size * size}

    def step(self, pressure: bool = False, reserve_pages: int = 0) -> StepReport:
        return self.reclaimer.step(
            sealed_upto=self.sealed(), pressure=pressure, reserve_pages=reserve_pages
        )

    def step_until_due(self) -> StepReport:
        """Go on to the step at which what the last one submitted is due; returns its report."""
        for _ in range(LAG - 1):
            assert self.step().committed == 0
        return self.step()

    def keep_every(self, stride: int, upto: int | None = None) -> None:
        """Evict all but every `stride`-th position below the open tail."""
        size = self.memory.page_size
        end = upto if upto is not None else (self.length - 1) // size * size
        evicted = np.arange(end)
        self.reclaimer.evict_tokens(ROW, evicted[evicted % stride != 0])

    def seen(self) -> dict[int, bytes]:
        """What attention reads."""
        return self.memory.live(ROW, self.length)

    def survivors_intact(self) -> bool:
        return all(self.written[pos] == digest for pos, digest in self.seen().items())

    def violations(self, tree_pages: list[int] | None = None) -> list[str]:
        return self.reclaimer.violations(
            self.memory.pool.free_array(),
            other_pages=np.array(tree_pages or [], np.int64),
            total_pages=self.memory.pool.total,
        )


MakeBench = Callable[..., Bench]


@pytest.fixture
def make_bench() -> MakeBench:
    """Builds a Bench whose row 1 is open with `length` tokens, the first `protected` tree-owned."""

    def make(
        *,
        page_size: int = 4,
        length: int = 38,
        protected: int = 0,
        pages: int = 40,
        identity: Identity | None = None,
        **settings: object,
    ) -> Bench:
        memory = MarkedRows(page_size=page_size, pages=pages)
        assert memory.grow(ROW, 0, length)
        copies = ManualCopyEngine()
        options = ReclaimSettings(**{"check": True, **settings})  # type: ignore[arg-type]
        reclaimer = Reclaimer(
            rows=RequestRows(memory.rows),
            buffers=memory.buffers,
            pool=memory.pool,
            copier=copies,
            settings=options,
            identity=identity,
        )
        reclaimer.open(ROW, Generation(3), RECORD, protected, length)
        return Bench(memory, copies, reclaimer, length, memory.live(ROW, length))

    return make


RECORD = object()
