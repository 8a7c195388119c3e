"""The state machine of the fuzz: what can happen, and what must hold after each of it."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.helpers.fake_fence import ManualCopy, ManualCopyEngine
from tests.helpers.marked_rows import MarkedRows
from tests.helpers.shadow_model import ShadowModel, ShadowRequest
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.types import CopyFailedError, Generation, ReclaimSettings, Row

ROWS = 4
WIDTH = 160
picks = st.integers(0, 1 << 16)
counted = {1: 0, 2: 0, 16: 0}
events = {
    name: 0 for name in ("committed", "dropped", "corrupt", "failed", "abandoned", "hole", "forked")
}


class CoreMachine(RuleBasedStateMachine):
    """One reclaimer over a small pool, so that pages are reused at once."""

    page_size = 16

    def __init__(self) -> None:
        super().__init__()
        pages = {1: 260, 2: 150, 16: 26}[self.page_size]
        self.memory = MarkedRows(page_size=self.page_size, pages=pages, num_rows=6, width=WIDTH)
        self.shadow, self.engine = ShadowModel(self.memory), ManualCopyEngine()
        self.generations = {row: 1 for row in range(6)}
        self.drifted: set[int] = set()
        self.expected_faults = 0
        self.ending = False
        self.reclaimer = Reclaimer(
            rows=RequestRows(self.memory.rows),
            buffers=self.memory.buffers,
            pool=self.memory.pool,
            copier=self.engine,
            settings=ReclaimSettings(check=True, threshold=0.2, hysteresis=0.02),
            identity=self.identity,
        )

    def identity(self, row: Row) -> tuple[Generation, object]:
        request = self.shadow.requests[row]
        return Generation(self.generations[row] + (row in self.drifted)), request.record

    def forked(self, row: int, new_protected_len: int) -> None:
        """The row lets go of the tree's pages above; the tree keeps them, exact, for others."""
        request = self.shadow.requests[row]
        kept = new_protected_len // self.page_size
        for page in request.tree_pages[kept:]:
            self.shadow.others[page] = request.tree_hashes[page]
        request.tree_pages = request.tree_pages[:kept]
        request.protected = new_protected_len
        events["forked"] += 1

    def forks_of_a_failed_step(self) -> None:
        """A failed copy leaves no report: the tables say what was committed before it."""
        for row, request in self.shadow.requests.items():
            table = self.reclaimer.table(Row(row))
            if table is not None and table.protected_len < request.protected:
                self.forked(row, table.protected_len)

    def some_row(self, pick: int) -> int | None:
        rows = sorted(self.shadow.requests)
        return rows[pick % len(rows)] if rows else None

    def some_copy(self, pick: int) -> ManualCopy | None:
        waiting = self.engine.waiting
        return waiting[pick % len(waiting)] if waiting else None

    def done(self) -> None:
        counted[self.page_size] += not self.ending

    @initialize(tree=st.integers(0, 2), rng_seed=picks)
    def begin(self, tree: int, rng_seed: int) -> None:
        """Requests that already lost tokens, so that most of a run has something to move."""
        for row in (1, 2):
            self.start(row, 110, tree)
            self.evict(row, 2 * rng_seed + row, 0.3)

    @rule(pick=picks, length=st.integers(1, 110), tree=st.integers(0, 3))
    def start(self, pick: int, length: int, tree: int) -> None:
        free_rows = [row for row in range(1, ROWS + 1) if row not in self.shadow.requests]
        if not free_rows:
            return
        row = free_rows[pick % len(free_rows)]
        protected = min(tree * self.page_size * (1 if self.page_size > 2 else 8), length)
        protected -= protected % self.page_size
        if not self.memory.grow(row, 0, length):
            return
        self.generations[row] += 1
        tree_pages = (
            self.memory.rows[row, : protected : self.page_size] // self.page_size
        ).tolist()
        request = ShadowRequest(
            record=object(),
            generation=self.generations[row],
            protected=protected,
            length=length,
            alive=self.memory.live(row, length),
            tree_pages=tree_pages,
            tree_hashes={page: self.memory.page_digests(page) for page in tree_pages},
        )
        self.shadow.requests[row] = request
        self.done()

    @rule(pick=picks, more=st.integers(1, 40))
    def extend(self, pick: int, more: int) -> None:
        row = self.some_row(pick)
        if row is None:
            return
        request = self.shadow.requests[row]
        length = min(request.length + more, WIDTH)
        if not self.memory.grow(row, request.length, length):
            return
        start, request.length = request.length, length
        seen = self.memory.live(row, length)
        request.alive |= {pos: seen[pos] for pos in range(start, length)}
        if request.opened and pick % 3:  # the glue may also tell later
            self.reclaimer.sync_new_tokens(Row(row), length)
        self.done()

    @rule(pick=picks, rng_seed=picks, share=st.sampled_from([0.02, 0.1, 0.3, 0.6, 0.95]))
    def evict(self, pick: int, rng_seed: int, share: float) -> None:
        row = self.some_row(pick)
        if row is None:
            return
        request = self.shadow.requests[row]
        open_start = (request.length - 1) // self.page_size * self.page_size
        if open_start == 0:
            return
        random = np.random.default_rng(rng_seed)
        if rng_seed % 2:
            first = int(random.integers(0, open_start))
            evicted = np.arange(first, min(open_start, first + 1 + int(share * open_start)))
        else:
            evicted = np.flatnonzero(random.random(open_start) < share)
        if not len(evicted):
            return
        if not request.opened:
            self.reclaimer.open(
                Row(row),
                Generation(request.generation),
                request.record,
                request.protected,
                request.length,
            )
            request.opened = True
        self.reclaimer.sync_new_tokens(Row(row), request.length)
        expected = len(set(evicted.tolist()) & set(request.alive))
        lost = self.reclaimer.evict_tokens(Row(row), random.permutation(evicted))
        assert lost == expected
        for pos in evicted.tolist():
            request.alive.pop(pos, None)
        if row in self.reclaimer.copies.pending and lost:
            events["hole"] += 1
        self.done()

    @rule(pick=picks, how=st.sampled_from(["finish", "abort", "retract"]))
    def end(self, pick: int, how: str) -> None:
        row = self.some_row(pick)
        if row is None or (pick % 2 and not self.ending):
            return
        request = self.shadow.requests[row]
        if request.opened:
            self.reclaimer.sync_new_tokens(Row(row), request.length)
            held = self.reclaimer.private_pages(Row(row))
            waiting = self.reclaimer.copies.pending.get(Row(row))
            pages = self.reclaimer.close(Row(row))
            abandoned = len(waiting.plan.dst_pages) if waiting else 0
            assert len(pages) == held - abandoned
            events["abandoned"] += waiting is not None
        else:
            pages = np.array(self.shadow.private_row_pages(row), np.int64)
        del self.shadow.requests[row]
        self.memory.rows[row] = 0
        self.memory.pool.release(np.concatenate([pages, np.array(request.tree_pages, np.int64)]))
        self.drifted.discard(row)
        self.done()
        if how == "retract":  # prefilled again at once, unpruned, in the same row
            self.start(row, request.length, request.protected // self.page_size)

    @rule(pressure=st.booleans(), skip=st.integers(0, 5), reserve=st.sampled_from([0, 0, 3]))
    def step(self, pressure: bool, skip: int, reserve: int) -> None:
        sealed = {}
        for row, request in self.shadow.requests.items():
            if request.opened:
                self.reclaimer.sync_new_tokens(Row(row), request.length)
            if row != skip:  # a chunk in flight or a finished request is left out
                in_flight = (request.length - 1) // self.page_size * self.page_size
                sealed[Row(row)] = in_flight
        free = self.memory.pool.free_pages()
        held = {row: self.reclaimer.private_pages(row) for row in sealed}
        stale = [
            copy.plan for row, copy in self.reclaimer.copies.pending.items() if row in self.drifted
        ]
        corrupt = self.reclaimer.copies.corrupt_copies
        try:
            report = self.reclaimer.step(
                sealed_upto=sealed, pressure=pressure, reserve_pages=reserve
            )
        except CopyFailedError:
            events["failed"] += 1
            self.forks_of_a_failed_step()
        else:
            for row, new_protected_len in report.forked:
                self.forked(row, new_protected_len)
            gained = self.memory.pool.free_pages() - free
            assert gained + report.taken_pages >= report.freed_empty_pages
            assert report.taken_pages == 0 or self.memory.pool.free_pages() >= reserve
            events["committed"] += report.committed
            events["dropped"] += report.dropped
            for row in sealed:
                copy = self.reclaimer.copies.pending.get(row)
                table = self.reclaimer.table(row)
                if table is not None and copy is None:
                    assert table.ledger.pages_held <= held[row]  # destinations were counted too
                if copy is not None and copy.plan.new_protected_len is None:
                    assert len(copy.plan.dst_pages) < len(copy.plan.source_pages)
        for plan in stale:  # refused: every live token still sits where the plan found it
            entries = self.memory.rows[plan.row].numpy()[plan.positions]
            assert ((entries == plan.src_slots) | (entries == 0)).all()
        found = self.reclaimer.copies.corrupt_copies - corrupt
        assert found <= self.expected_faults
        self.expected_faults -= found
        events["corrupt"] += found
        self.reclaimer.copies.faults.clear()
        self.drifted.clear()
        self.done()

    @rule(rng_seed=picks, share=st.sampled_from([0.1, 0.3, 0.6]), pressure=st.booleans())
    def evict_everywhere_and_step(self, rng_seed: int, share: float, pressure: bool) -> None:
        for pick in range(len(self.shadow.requests)):
            self.evict(pick, rng_seed + pick, share)
        self.step(pressure, 0, 0)

    @rule(pressure=st.booleans())
    def finish_copies_and_step(self, pressure: bool) -> None:
        self.finish_copy(0, True)
        self.step(pressure, 0, 0)

    @rule(pick=picks, keep=st.integers(0, 8))
    def fork(self, pick: int, keep: int) -> None:
        row = self.some_row(pick)
        if row is None or not self.shadow.requests[row].opened:
            return
        protected = self.shadow.requests[row].protected
        new_protected_len = min(keep, protected // self.page_size - 1) * self.page_size
        if new_protected_len < 0:
            return
        busy, free = row in self.reclaimer.copies.pending, self.memory.pool.free_pages()
        plan = self.reclaimer.fork(Row(row), new_protected_len)
        if plan is None:
            assert busy or free < len(self.shadow.requests[row].alive)
            assert self.memory.pool.free_pages() == free
        self.done()

    @rule(pick=picks)
    def engine_reuses_row(self, pick: int) -> None:
        """The engine's generation moves on without a word: plans of that row must be refused."""
        if (row := self.some_row(pick)) is not None and pick % 3 == 0:
            self.drifted.add(row)
            self.done()

    @rule(pick=picks)
    def settle(self, pick: int) -> None:
        if pick % 3:
            return
        self.expected_faults = 0
        try:
            for row, new_protected_len in self.reclaimer.settle(1.0).forked:
                self.forked(row, new_protected_len)
        except CopyFailedError:
            events["failed"] += 1
            self.forks_of_a_failed_step()
        assert self.reclaimer.held_pages() == 0
        self.drifted.clear()
        self.reclaimer.copies.faults.clear()
        self.done()

    @rule(pick=picks, again=st.booleans())
    def finish_copy(self, pick: int, again: bool) -> None:
        for copy in self.engine.waiting if again else [self.some_copy(pick)]:
            if copy is not None:
                copy.finish()
                self.done()

    @rule(pick=picks, first=st.integers(0, 30), count=st.integers(1, 30))
    def part_of_a_copy(self, pick: int, first: int, count: int) -> None:
        if (copy := self.some_copy(pick)) is not None:
            copy.run(first, first + count)
            self.done()

    @rule(pick=picks, how=st.sampled_from(["lost", "torn", "failed"]))
    def spoil_copy(self, pick: int, how: str) -> None:
        if (copy := self.some_copy(pick)) is None or pick % 2:
            return
        if how == "torn":
            copy.run_one_buffer()
        copy.over = how != "failed"
        copy.failed = how == "failed"
        self.expected_faults += len(self.reclaimer.copies.pending)
        self.done()

    @rule(count=st.integers(1, 6), take=st.booleans())
    def neighbour(self, count: int, take: bool) -> None:
        size = self.memory.page_size
        if take and (pages := self.memory.pool.allocate(count)) is not None:
            for page in pages.tolist():
                self.memory.write(np.arange(page * size, (page + 1) * size))
                self.shadow.others[page] = self.memory.page_digests(page)
        elif self.shadow.others:
            back = list(self.shadow.others)[:count]
            for page in back:
                del self.shadow.others[page]
            self.memory.pool.release(np.array(back, np.int64))
        else:
            return
        self.done()

    @invariant()
    def memory_is_what_the_engine_wrote(self) -> None:
        assert self.shadow.differences() == []

    @invariant()
    def nothing_is_violated(self) -> None:
        for row, request in self.shadow.requests.items():
            if request.opened:
                self.reclaimer.sync_new_tokens(Row(row), request.length)
        found = self.reclaimer.violations(
            self.memory.pool.free_array(),
            other_pages=self.shadow.other_pages(),
            total_pages=self.memory.pool.total,
        )
        assert found == []

    def teardown(self) -> None:
        self.ending = True
        for row in list(self.shadow.requests):
            self.end(sorted(self.shadow.requests).index(row), "finish")
        try:
            self.reclaimer.settle(1.0)
        except CopyFailedError:
            events["failed"] += 1
        assert self.reclaimer.held_pages() == 0
        assert self.memory.pool.free_pages() + len(self.shadow.others) == self.memory.pool.total
