"""What the scheduler process keeps for token virtualization, and what it does at the safe point.

One `Runtime` per scheduler. It owns the policy state of each running request and drives the
`core.reclaimer.Reclaimer`; SGLang's rows, allocator and tree stay the only truth about who owns
which slot. Every method runs in the scheduler thread.

Order at the safe point (entry of `get_next_batch_to_run`, no forward being prepared):
tables catch up with tokens SGLang appended -> due requests are pruned (all of them when the pool is
short) -> the reclaimer commits finished copies, frees empty pages and submits new repacks -> net
page counts go to SGLang's records.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken_sglang.core.device_work import make_device_work
from vtoken_sglang.core.footprint import page_ceil
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.settings import ReclaimSettings
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Generation, Row
from vtoken_sglang.engine.admission.demand import Capacity
from vtoken_sglang.engine.admission.limits import Lengths
from vtoken_sglang.engine.admission.shortage import Relief
from vtoken_sglang.engine.attention.backends import install_live_lengths
from vtoken_sglang.engine.observe.decode_tap import current_tap
from vtoken_sglang.engine.observe.observer import Observer
from vtoken_sglang.engine.observe.setup import make_observer
from vtoken_sglang.engine.runtime.accounting import PrunedRequest, account, footprint
from vtoken_sglang.engine.runtime.copiers import make_copy_engine
from vtoken_sglang.engine.runtime.eviction_pass import Ahead, EvictionPass
from vtoken_sglang.engine.runtime.page_pool import AllocatorPagePool
from vtoken_sglang.engine.runtime.policy_failure import ending
from vtoken_sglang.engine.runtime.request_options import OptionsOf
from vtoken_sglang.engine.runtime.row_owners import prunable, row_owners
from vtoken_sglang.engine.sharing.forks import PrefixForks
from vtoken_sglang.engine.statistics import Statistics
from vtoken_sglang.errors import InvariantError
from vtoken_sglang.options import VTokenConfig
from vtoken_sglang.policy.eviction import due

# Seconds after which a copy that does not finish is an error.
COPY_TIMEOUT = 30.0


class Runtime:
    """Token virtualization of one scheduler."""

    def __init__(self, scheduler: Any, config: VTokenConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._rows = scheduler.req_to_token_pool
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._page_size: int = self._allocator.page_size
        self._pool = AllocatorPagePool(self._allocator, scheduler.tree_cache)
        pool = self._allocator.get_kvcache()
        copier = make_copy_engine(scheduler, config)
        self._reclaimer = Reclaimer(
            rows=self._rows.req_to_token,
            buffers=[*pool.k_buffer, *pool.v_buffer],
            pool=self._pool,
            copier=copier,
            settings=ReclaimSettings(
                threshold=config.repack_threshold, reclaim=config.reclaims, check=config.check
            ),
            identity=self._identity,
            on_fork=lambda row, length: self._forks.move_lock(row, length),
        )
        self._forks = PrefixForks(scheduler, self._reclaimer)
        device = torch.device(self._allocator.device)
        if device.type == "cuda":
            is_dense = self._reclaimer.is_dense if config.page_mode == "dense" else None
            install_live_lengths(lambda row: int(self._reclaimer.evicted_counts[row]), is_dense)
        self._requests: dict[int, PrunedRequest] = {}  # by row; dropped with the row
        self.observer: Observer = make_observer(
            self._rows.req_to_token,
            scheduler.tp_worker.model_runner,
            config,
            options_of=lambda request: self._options_of(request).options,
            table_of=self._table_of,
            work=make_device_work(scheduler, copier),
            page_size=self._page_size,
            tap=current_tap(),
        )
        end = ending(scheduler)
        self._looks = EvictionPass(self.observer, self.observer.work, device, end, self._page_size)
        self._idle_checked = False
        self.statistics = Statistics()
        if config.trace is not None:
            self.statistics.trace = open(config.trace, "a", encoding="utf-8")  # noqa: SIM115
        self._resolve = OptionsOf(config)
        self.capacity = Capacity(
            scheduler, config, self._resolve, self._tables, self._forks.waiting
        )
        self.lengths = Lengths(scheduler, self.capacity)
        looks = config.shortage == "relieve" and config.reclaims
        work = (self._relieve, self.drain, looks)
        self.relief = Relief(scheduler, self.capacity, self._pool, self.statistics, *work)

    # -- the safe point -----------------------------------------------------------------------

    def safe_point(self, running_batch: Any, last_batch: Any) -> None:
        """Prune what is due, then reclaim. Call before SGLang merges, stashes or allocates."""
        self._idle_checked = False
        owners = row_owners(self._scheduler, running_batch, last_batch)
        free = self._pool.free_pages()
        # The next decode step may open a page for every running request. When there are fewer,
        # repacks may have those that it will not open: they return more than they take.
        short = self.relief.wanted(len(owners))
        opened = self.capacity.soon_opened(owners, steps=1) // self._page_size
        reserve = opened if short else len(owners)
        ahead = Ahead.USEFULLY if short else Ahead.NEVER
        worked = self._work(owners, owners, ahead, reserve_pages=reserve)
        self.relief.watch(len(running_batch.reqs))
        now_free = self._pool.free_pages()
        self.relief.gained(now_free - free if short else None)
        if self.capacity.expects and (now_free > free or self.capacity.changed):
            # SGLang looks again when a request leaves; memory came back, or prefixes to hit did.
            running_batch.batch_is_full = False
        if worked and self._config.check:
            self.assert_healthy()

    def _relieve(self, batch: Any) -> None:
        """Evict from the requests of a decode batch ahead of time and wait for what that frees.
        The chunked request is left out: its chunk has just been stashed."""
        owners = row_owners(self._scheduler, batch)
        decoding = [r for r in owners if r is not self._scheduler.chunked_req]
        self._work(decoding, owners, Ahead.ALWAYS, reserve_pages=0)
        self._looks.wait()
        self._reclaimer.copies.wait(COPY_TIMEOUT)
        self._work(decoding, owners, Ahead.NEVER, reserve_pages=0)

    def _work(
        self, candidates: list[Any], owners: list[Any], ahead: Ahead, reserve_pages: int
    ) -> bool:
        """Prune the candidates due by now or `ahead`, then reclaim; whether there was any work.

        `owners`: every request with a row. `reserve_pages`: pages repacks leave alone.
        """
        sealed: dict[Row, int] = {}
        looked_at: list[Any] = []
        chunked, self.capacity.changed = self._scheduler.chunked_req, False
        for request, sealed_len in prunable(candidates, chunked, self._page_size):
            row = Row(request.kv.req_pool_idx)
            if self._reclaimer.table(row) is not None:
                self._reclaimer.sync_new_tokens(row, request.kv.kv_allocated_len)
            first = self._options_of(request).last_len == 0
            looked = self._prune_if_due(request, sealed_len, ahead)
            self.capacity.changed |= looked and first
            if looked or row in self._forks.waiting:
                looked_at.append(request)
            if self._reclaimer.table(row) is not None:
                sealed[row] = sealed_len
        if not sealed and not self._reclaimer.copies.busy:
            return False
        pressure = ahead is not Ahead.NEVER or self.capacity.under_pressure(self._pool.free_pages())
        self._fork_prefixes(looked_at, owners, pressure)
        report = self._reclaimer.step(
            sealed_upto=sealed, pressure=pressure, reserve_pages=reserve_pages
        )
        self.statistics.add_step(report)
        self._forks.given_up()
        self._account_all()
        if self._config.copy == "sync":
            self._reclaimer.copies.wait(COPY_TIMEOUT)
        return True

    def _prune_if_due(self, request: Any, sealed_len: int, ahead: Ahead) -> bool:
        """EvictionPlan for evicted if it is time to or `ahead` allows, eviction those found;
        whether it did."""
        state = self._options_of(request)
        kv = request.kv
        on_time = due(state.options, state.last_len, kv.kv_committed_len)
        looked, evicted = self._looks.take_turn(
            request, state, sealed_len, self._live_positions, ahead
        )
        self.statistics.early_evictions += looked and not on_time
        if evicted is None:
            return looked
        if state.options.shared == "skip":
            shared = evicted < kv.cache_protected_len
            # Decided as under every other strategy, but tree-owned pages are left as they are.
            state.skipped = np.concatenate([state.skipped, evicted[shared]])
            evicted = evicted[~shared]
        if evicted.size:
            self._evict(request, evicted)
        return True

    def _live_positions(self, state: PrunedRequest, kv: Any) -> NDArray[np.int64]:
        """Positions the policy still counts as alive, ascending."""
        table = self._table_of(kv.req_pool_idx)
        positions = np.arange(kv.kv_committed_len, dtype=np.int64)
        alive = np.ones(len(positions), np.bool_) if table is None else table.alive(positions)
        alive[state.skipped] = False
        return positions[alive]

    def _fork_prefixes(self, looked_at: list[Any], owners: list[Any], pressure: bool) -> None:
        """Copy-on-write for the requests whose kept set may just have changed."""
        states = [(r, self._options_of(r).options) for r in looked_at]
        forking = [(r, options.shared) for r, options in states if options.may_fork]
        if forking and self._config.reclaims:
            able = {row for row, state in self._requests.items() if state.options.may_fork}
            holders = self._forks.holders(owners, able)
            self._forks.consider_all(forking, holders, self._pool.free_pages, pressure)

    def _evict(self, request: Any, evicted: NDArray[np.int64]) -> None:
        kv = request.kv
        row = Row(kv.req_pool_idx)
        if self._reclaimer.table(row) is None:
            self._forks.adopt(request)
            self._reclaimer.open(
                row,
                Generation(int(self._rows.req_generation[row])),
                kv,
                kv.cache_protected_len,
                kv.kv_allocated_len,
            )
            # From now on the row has holes: it must never reach the tree.
            request.skip_radix_cache_insert = True
            self.statistics.pruned_requests += 1
        self._reclaimer.evict_tokens(row, evicted)
        self.statistics.add_eviction(request.rid, kv.kv_committed_len, evicted)

    # -- the life of a request ------------------------------------------------------------------

    def on_queued(self, request: Any, retracted: bool = False) -> None:
        """A request enters the waiting queue: keep its prompt out of the tree if it says so, or if
        the tree would hold more of it than the pool has."""
        self.statistics.retractions += retracted
        options = self._resolve(request)
        never = options.prunes and options.publish == "never"
        if never or self.lengths.keeps_private(request):
            request.skip_radix_cache_insert = True

    def owns(self, kv: Any) -> bool:
        """True when the ledger, not the row, says what this record's pages are."""
        if kv.req_pool_idx is None:
            return False
        table = self._reclaimer.table(Row(kv.req_pool_idx))
        if table is not None and table.record is kv:
            return True
        state = self._requests.get(kv.req_pool_idx)
        return state is not None and state.released

    def release(self, kv: Any) -> None:
        """Free every page the ledger holds, once. SGLang asks again for an overallocated tail."""
        state = self._requests[kv.req_pool_idx]
        if state.released:
            return
        row = Row(kv.req_pool_idx)
        self._reclaimer.sync_new_tokens(row, kv.kv_allocated_len)
        pages = self._reclaimer.close(row)
        state.released = True
        self._pool.release_at_end(pages)
        owned = page_ceil(kv.kv_allocated_len, self._page_size)
        kv.kv_reclaimed_tokens = owned - kv.cache_protected_len

    def forget_row(self, row: int) -> None:
        """The row went back to the pool (finish, abort or retraction): forget all evictions."""
        if self._reclaimer.table(Row(row)) is not None:
            raise InvariantError(f"row {row} was freed while its ledger still holds pages")
        self._requests.pop(row, None)
        self._forks.forget(row)
        self.observer.forget(row)
        self._looks.forget(row)

    def drain(self) -> None:
        """Wait for copies and return what they hold, so that the pool adds up. For idle, flush."""
        if not self._reclaimer.copies.busy:
            return
        if not self._reclaimer.drain(COPY_TIMEOUT):
            raise InvariantError(f"a copy did not finish in {COPY_TIMEOUT} s; its pages are held")
        # A flush is refused while requests run, but their finished copies were committed above.
        self._forks.given_up()
        self._account_all()

    def orphaned_tokens(self) -> int:
        """Tokens in destinations of copies whose request has ended (they are in no record)."""
        return self._page_size * sum(len(pages) for pages, _ in self._reclaimer.copies.orphans)

    # -- checks and numbers ---------------------------------------------------------------------

    def assert_healthy(self) -> None:
        """Raise InvariantError with every violation found."""
        violations = self._reclaimer.violations(self._pool.free_page_ids())
        if violations:
            raise InvariantError("; ".join(violations))

    def assert_idle(self) -> None:
        """Raise InvariantError if anything of a request is left when the server is idle.

        Once per idle phase: SGLang's loop comes here many times a second.
        """
        if self._idle_checked:
            return
        held = self._reclaimer.held_pages()
        if held or self._requests:
            rows = sorted(self._requests)
            raise InvariantError(f"idle, but {held} held pages and state of rows {rows} are left")
        self.assert_healthy()
        self._idle_checked = True

    def describe(self) -> dict[str, Any]:
        """Counters and gauges for `/server_info`."""
        tables = self._tables()
        return {
            **self.statistics.as_dict(),
            "pruned_rows": len(tables),
            "held_pages": self._reclaimer.held_pages(),
            "retained_pages": sum(t.ledger.pages_held for t in tables),
            "live_private_tokens": sum(t.live_len - t.tree_owned_live() for t in tables),
            "footprint": footprint(self.capacity, self._requests.values(), tables),
            **self.observer.counters(),
            "policy_errors": self._looks.failed,
            "forks": self._forks.describe(),
        }

    # -- helpers --------------------------------------------------------------------------------

    def _identity(self, row: Row) -> tuple[Generation, object]:
        state = self._requests.get(row)
        record = None if state is None else state.record
        return Generation(int(self._rows.req_generation[row])), record

    def _table_of(self, row: int) -> TokenTable | None:
        return self._reclaimer.table(Row(row))

    def _tables(self) -> list[TokenTable]:
        return [t for t in map(self._table_of, self._requests) if t is not None]

    def _options_of(self, request: Any) -> PrunedRequest:
        row = request.kv.req_pool_idx
        state = self._requests.get(row)
        if state is None:
            state = self._requests[row] = PrunedRequest(request.kv, self._resolve(request))
        return state

    def _account_all(self) -> None:
        """Tell SGLang's records what each pruned row holds now.

        All of them: a finished copy is committed for rows that were not worked on, too.
        """
        for row, state in self._requests.items():
            if not state.released and (table := self._table_of(row)) is not None:
                account(state.record, table, self._reclaimer.private_pages(table.row))
