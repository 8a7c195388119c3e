"""What the scheduler process keeps for token virtualization, and what it does at the safe point.

One `Runtime` per scheduler. It keeps one `RequestState` per row and drives the stages; SGLang's
rows, allocator and tree stay the only truth about who owns which slot. Every method runs in the
scheduler thread.

Order at the safe point (entry of `get_next_batch_to_run`, no forward being prepared):

    tables catch up with tokens SGLang appended
    eviction pass     policies that are due are asked (ahead of time when the pool is short)
    evict             their tokens are marked: rows, counts and ledger together
    sharing           prefixes that the tree owns are forked where that pays
    reclaim           finished copies are committed, empty pages freed, new repacks submitted
    locks             of the prefixes that committed forks have left are given up
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vtoken_sglang.core.copies import COPY_TIMEOUT
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Generation, Int64Array, ReclaimSettings, Row, StepReport
from vtoken_sglang.engine.admission.demand import Demand
from vtoken_sglang.engine.admission.limits import LengthLimits
from vtoken_sglang.engine.admission.shortage import ShortageRelief
from vtoken_sglang.engine.observe.decode_tap import current_tap
from vtoken_sglang.engine.observe.observer import Observer
from vtoken_sglang.engine.request_state import RequestState
from vtoken_sglang.engine.runtime.accounting import footprint, private_tokens
from vtoken_sglang.engine.runtime.copiers import make_copy_engine, make_device_work, note_forward
from vtoken_sglang.engine.runtime.eviction_pass import (
    Ahead,
    EvictionPass,
    Outcome,
    skip_tree_owned,
)
from vtoken_sglang.engine.runtime.health import Health
from vtoken_sglang.engine.runtime.page_pool import AllocatorPagePool
from vtoken_sglang.engine.runtime.policy_failure import end_request
from vtoken_sglang.engine.runtime.ranks import Ranks
from vtoken_sglang.engine.runtime.request_options import OptionsOf
from vtoken_sglang.engine.runtime.row_owners import prunable, row_owners
from vtoken_sglang.engine.sharing.forks import PrefixForks
from vtoken_sglang.engine.statistics import Statistics
from vtoken_sglang.errors import InvariantError
from vtoken_sglang.options import VTokenConfig
from vtoken_sglang.policy.registry import load_policy

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


class Runtime:
    """Token virtualization of one scheduler.

    Fields:
        states: one per row in use, by row.
        observer, demand, limits, relief, health, statistics: the stages that hooks ask.
    """

    def __init__(self, scheduler: Scheduler, config: VTokenConfig) -> None:
        self._scheduler = scheduler
        self._config = config
        self._rows = scheduler.req_to_token_pool
        allocator = scheduler.token_to_kv_pool_allocator
        self._page_size: int = allocator.page_size
        self._pool = AllocatorPagePool(allocator, scheduler.tree_cache)
        self.states: dict[int, RequestState] = {}
        self._options_of = OptionsOf(config)
        self.ranks = Ranks.of(scheduler)
        pool = allocator.get_kvcache()
        self._copier = make_copy_engine(scheduler, config)
        self.reclaimer = Reclaimer(
            rows=RequestRows(self._rows.req_to_token),
            buffers=[*pool.k_buffer, *pool.v_buffer],
            pool=self._pool,
            copier=self._copier,
            settings=ReclaimSettings(
                threshold=config.repack_threshold, reclaim=config.reclaims, check=config.check
            ),
            identity=self._identity,
        )
        self.forks = PrefixForks(scheduler, self.reclaimer)
        work = make_device_work(scheduler, self._copier)
        self.observer = Observer(
            rows=self._rows.req_to_token,
            k_buffers=list(pool.k_buffer),
            key_dtype=getattr(pool, "dtype", None),
            observe_layers=config.observe_layers,
            observe_every=config.observe_every,
            work=work,
            page_size=self._page_size,
            tap=current_tap(),
        )
        device = torch.device(allocator.device)
        self._evictions = EvictionPass(self.observer, work, device, self._page_size, self.ranks)
        self.statistics = Statistics.with_trace(self.ranks.trace_path(config.trace))
        self.demand = Demand(scheduler, config, self._options_of, self._tables, self._fork_wanted)
        self.limits = LengthLimits(scheduler, self.demand)
        self.relief = ShortageRelief(
            scheduler,
            self.demand,
            self._pool,
            self.statistics,
            self._relieve,
            self.drain,
            config.shortage == "relieve" and config.reclaims,
        )
        self.health = Health(scheduler, self._pool, self.reclaimer, self.forks, config.check)

    # -- the safe point -----------------------------------------------------------------------

    def safe_point(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> None:
        """Evict what is due, then reclaim. Call before SGLang merges, stashes or allocates."""
        owners = row_owners(self._scheduler, running_batch, last_batch)
        if owners:
            self.health.busy()
        free = self._pool.free_pages()
        # The next decode step may open a page for every running request. When there are fewer,
        # repacks may have those that it will not open: they return more than they take.
        short = self.relief.wanted(len(owners))
        opened = self.demand.soon_opened(owners, steps=1) // self._page_size
        ahead = Ahead.USEFULLY if short else Ahead.NEVER
        states = [self.state_of(request) for request in owners]
        worked = self._work(states, ahead, reserve_pages=opened if short else len(owners))
        self.relief.watch(len(running_batch.reqs))
        now_free = self._pool.free_pages()
        self.relief.gained(now_free - free if short else None)
        if self.demand.reopens(now_free > free):
            # SGLang admits again when a request leaves; here there may be room before that.
            running_batch.batch_is_full = False
        if worked:
            self.ranks.note("free and freed pages", now_free, self.statistics.freed_pages)
            self.ranks.worked(every_step=self._config.check)
            self.health.after_step(self.states.values())

    def _relieve(self, batch: ScheduleBatch) -> None:
        """Evict from the requests of a decode batch ahead of time and wait for what that frees.
        The chunked request is left out: its chunk has just been stashed."""
        chunked = self._scheduler.chunked_req
        owners = row_owners(self._scheduler, batch)
        decoding = [self.state_of(request) for request in owners if request is not chunked]
        self._work(decoding, Ahead.ALWAYS, reserve_pages=0)
        self._act_on(self.reclaimer.settle(COPY_TIMEOUT))
        self._work(decoding, Ahead.NEVER, reserve_pages=0, settle=True)

    def _work(
        self,
        states: Sequence[RequestState],
        ahead: Ahead,
        *,
        reserve_pages: int,
        settle: bool = False,
    ) -> bool:
        """Evict from those that are due by now or `ahead`, then reclaim; whether there was any
        work. `reserve_pages`: pages that repacks leave alone. `settle`: see `EvictionPass.run`."""
        self.demand.changed = False
        self.observer.prefix_scores.next_pass()
        candidates = list(prunable(states, self._scheduler.chunked_req, self._page_size))
        for state in (candidate.state for candidate in candidates):
            if state.table is not None:
                state.table.sync_new_tokens(state.record.kv_allocated_len)
        forking: list[RequestState] = []
        for outcome in self._evictions.run(candidates, ahead, settle=settle):
            self._apply(outcome)
            if outcome.asked or outcome.state.fork_wanted is not None:
                forking.append(outcome.state)
        sealed = {c.state.row: c.sealed_len for c in candidates if c.state.table is not None}
        if not sealed and not self.reclaimer.copies.busy:
            return False
        pressure = ahead is not Ahead.NEVER or self.relief.under_pressure()
        self._fork_prefixes(forking, pressure)
        report = self.reclaimer.step(
            sealed_upto=sealed, pressure=pressure, reserve_pages=reserve_pages
        )
        self._act_on(report)
        if self._config.copy == "sync":
            self._act_on(self.reclaimer.settle(COPY_TIMEOUT))
        return True

    def _apply(self, outcome: Outcome) -> None:
        """Evict what a request's policy selected, or end the request if it failed."""
        state = outcome.state
        self.demand.changed |= outcome.first
        self.statistics.early_evictions += outcome.early
        if outcome.error is not None:
            self.statistics.policy_errors += 1
            end_request(self._scheduler, state.request, outcome.error)
        if outcome.evicted is None:
            return
        evicted = skip_tree_owned(state, outcome.evicted)
        if evicted.size:
            self._evict(state, evicted)

    def _evict(self, state: RequestState, evicted: Int64Array) -> None:
        record = state.record
        if state.table is None:
            self.forks.holders.update([state])
            state.table = self.reclaimer.open(
                state.row,
                state.generation,
                record,
                record.cache_protected_len,
                record.kv_allocated_len,
            )
            # From now on the row has holes: it must never reach the tree.
            state.request.skip_radix_cache_insert = True
            self.statistics.pruned_requests += 1
        self.reclaimer.evict_tokens(state.row, evicted)
        self.ranks.note("evicted", state.request.rid, record.kv_committed_len, evicted)
        self.statistics.add_eviction(state.request.rid, record.kv_committed_len, evicted)

    def _fork_prefixes(self, asked: Iterable[RequestState], pressure: bool) -> None:
        """Copy-on-write for the requests whose kept set may just have changed."""
        forking = [s for s in asked if s.options.may_fork and s.record.cache_protected_len]
        if not forking or not self._config.reclaims:
            return
        self.forks.holders.update(self.states.values())
        for state in forking:  # one after the other: each takes pages
            self.forks.consider(state, free_pages=self._pool.free_pages(), pressure=pressure)

    def _act_on(self, report: StepReport) -> None:
        """What the reclaimer did, told to the counters and to the forks it committed or dropped."""
        self.statistics.add_step(report)
        for row, protected_len in report.forked:
            self.forks.move_lock(self.states[row], protected_len)
        for row in report.given_up:
            self.states[row].fork = None  # the request may try again

    # -- a forward --------------------------------------------------------------------------------

    def forward_launched(self) -> None:
        """A forward was launched on the current stream; later copies wait for it."""
        note_forward(self._copier)

    # -- the life of a request ------------------------------------------------------------------

    def state_of(self, request: Req) -> RequestState:
        """The state of a request with a row, made when it is first asked for."""
        row = request.kv.req_pool_idx
        state = self.states.get(row)
        if state is None:
            options = self._options_of(request)
            state = self.states[row] = RequestState(
                request=request,
                record=request.kv,
                row=Row(row),
                generation=Generation(int(self._rows.req_generation[row])),
                options=options,
                policy=load_policy(options.policy, options.policy_args) if options.prunes else None,
                prompt_interval=self.demand.prompt_interval(request),
            )
        return state

    def on_queued(self, request: Req, retracted: bool = False) -> None:
        """A request enters the waiting queue: keep its prompt out of the tree if it says so, or if
        the tree would hold more of it than the pool has."""
        self.statistics.retractions += retracted
        options = self._options_of(request)
        never = options.prunes and options.publish == "never"
        if never or self.limits.keeps_private(request):
            request.skip_radix_cache_insert = True

    def owns(self, kv: ReqKvInfo) -> bool:
        """True when the ledger, not the row, says what this record's pages are."""
        state = self.states.get(kv.req_pool_idx) if kv.req_pool_idx is not None else None
        return state is not None and (
            state.released or state.table is not None and state.record is kv
        )

    def release(self, kv: ReqKvInfo) -> None:
        """Free every page the ledger holds, once. SGLang asks again for an overallocated tail."""
        state = self.states[kv.req_pool_idx]
        if state.released:
            return
        self.reclaimer.sync_new_tokens(state.row, kv.kv_allocated_len)
        pages = self.reclaimer.close(state.row)
        state.released, state.table = True, None
        self._pool.release_at_end(pages)

    def forget_row(self, row: int) -> None:
        """The row went back to the pool (finish, abort or retraction): its state goes with it."""
        state = self.states.pop(row, None)
        if state is None:
            return
        if state.table is not None:
            raise InvariantError(f"row {row} was freed while its ledger still holds pages")
        self.forks.holders.cut(state, 0)
        self.observer.release(state)

    def drain(self) -> None:
        """Wait for copies and return what they hold, so that the pool adds up. For idle, flush."""
        if not self.reclaimer.copies.busy:
            return
        self._act_on(self.reclaimer.drain(COPY_TIMEOUT))

    def idle(self) -> None:
        """The scheduler has nothing to do: settle copies and check, once per idle phase."""
        self.drain()
        if self._scheduler.is_fully_idle():
            self.health.idle(self.states.values())

    def private_tokens(self, kv: ReqKvInfo) -> int | None:
        """Private tokens of a pruned request's record; None for others: SGLang's count holds."""
        state = None if kv.req_pool_idx is None else self.states.get(kv.req_pool_idx)
        if state is None or state.table is None or state.record is not kv:
            return None
        return private_tokens(kv, state.table, self.reclaimer.private_pages(state.row))

    def orphaned_tokens(self) -> int:
        """Tokens in destinations of copies whose request has ended (they are in no record)."""
        return self._page_size * self.reclaimer.abandoned_pages()

    # -- numbers --------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Counters and gauges for `/server_info`."""
        tables = self._tables()
        return {
            **self.statistics.as_dict(),
            "pruned_rows": len(tables),
            "held_pages": self.reclaimer.held_pages(),
            "retained_pages": sum(t.ledger.pages_held for t in tables),
            "live_private_tokens": sum(t.live_len - t.tree_owned_live() for t in tables),
            "footprint": footprint(self.demand, self.states.values()),
            **self.observer.counters(),
            "forks": self.forks.describe(),
            "ranks": self.ranks.counters(),
        }

    # -- helpers --------------------------------------------------------------------------------

    def _identity(self, row: Row) -> tuple[Generation, object]:
        state = self.states.get(row)
        record = None if state is None else state.record
        return Generation(int(self._rows.req_generation[row])), record

    def _tables(self) -> list[TokenTable]:
        return [state.table for state in self.states.values() if state.table is not None]

    def _fork_wanted(self, row: int) -> int | None:
        state = self.states.get(row)
        return None if state is None else state.fork_wanted
