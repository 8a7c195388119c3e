"""What the scheduler process keeps for token virtualization, and what it does at the safe point.

One `Runtime` per scheduler. It owns the policy state of each running request and drives the
engine-free `core.reclaimer.Reclaimer`; SGLang's rows, allocator and tree stay the only truth about
who owns which slot. Every method runs in the scheduler thread.

Order at the safe point (entry of `get_next_batch_to_run`, no forward being prepared):
tables catch up with tokens SGLang appended -> due requests are pruned -> the reclaimer commits
finished copies, frees dead pages and submits new repacks -> net page counts go to SGLang's records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken_sglang.config import RequestOptions, VTokenConfig
from vtoken_sglang.core.ids import Generation, Row
from vtoken_sglang.core.reclaimer import Reclaimer
from vtoken_sglang.core.settings import ReclaimSettings
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.engine.backends import install_live_lengths
from vtoken_sglang.engine.copiers import make_copy_engine
from vtoken_sglang.engine.device_work import make_device_work
from vtoken_sglang.engine.looks import Looks
from vtoken_sglang.engine.observation import Observer, make_observer
from vtoken_sglang.engine.owners import prunable, row_owners
from vtoken_sglang.engine.page_pool import AllocatorPagePool
from vtoken_sglang.engine.prefix import PrefixForks
from vtoken_sglang.engine.statistics import Statistics
from vtoken_sglang.errors import InvariantError

# Below this share of free pages the planner is told that the pool is under pressure.
PRESSURE_FREE_SHARE = 1 / 8
# Seconds after which a copy that does not finish is an error.
COPY_TIMEOUT = 30.0


@dataclass(slots=True)
class PrunedRequest:
    """Policy state of one request that may be pruned.

    Fields:
        record: SGLang's `ReqKvInfo` of the request, its identity.
        options: what holds for this request.
        last_len: logical length at the last look for victims; 0 before the first, and again after
            a retraction, which forgets every kill.
        skipped: tree-owned positions that are decided dead but left alone (strategy `skip`).
        released: its row went back to SGLang; nothing of it may be freed again.
    """

    record: Any
    options: RequestOptions
    last_len: int = 0
    released: bool = False
    skipped: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


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
        self._reclaimer = Reclaimer(
            rows=self._rows.req_to_token,
            buffers=[*pool.k_buffer, *pool.v_buffer],
            pool=self._pool,
            copier=make_copy_engine(scheduler, config),
            settings=ReclaimSettings(
                threshold=config.repack_threshold, reclaim=config.reclaims, check=config.check
            ),
            identity=self._identity,
            on_fork=lambda row, length: self._forks.move_lock(row, length),
        )
        self._forks = PrefixForks(scheduler, self._reclaimer)
        if torch.device(self._allocator.device).type == "cuda":
            install_live_lengths(lambda row: int(self._reclaimer.dead_counts[row]))
        self._requests: dict[int, PrunedRequest] = {}  # by row; dropped with the row
        self.observer: Observer = make_observer(
            self._rows.req_to_token,
            pool.k_buffer,
            config,
            options_of=lambda request: self._options_of(request).options,
            table_of=self._table_of,
            work=make_device_work(scheduler),
            page_size=self._page_size,
        )
        self._looks = Looks(self.observer, self.observer.work, torch.device(self._allocator.device))
        self._idle_checked = False
        self.statistics = Statistics()
        if config.trace is not None:
            self.statistics.trace = open(config.trace, "a", encoding="utf-8")  # noqa: SIM115

    # -- the safe point -----------------------------------------------------------------------

    def safe_point(self, running_batch: Any, last_batch: Any) -> None:
        """Prune what is due, then reclaim. Call before SGLang merges, stashes or allocates."""
        self._idle_checked = False
        owners = row_owners(self._scheduler, running_batch, last_batch)
        sealed: dict[Row, int] = {}
        looked_at: list[Any] = []
        for request, sealed_len in prunable(
            owners, self._scheduler.chunked_req, self._page_size, self._publishes
        ):
            row = Row(request.kv.req_pool_idx)
            if self._reclaimer.table(row) is not None:
                self._reclaimer.sync_new_tokens(row, request.kv.kv_allocated_len)
            if self._prune_if_due(request, sealed_len):
                looked_at.append(request)
            if self._reclaimer.table(row) is not None:
                sealed[row] = sealed_len
        if not sealed and not self._reclaimer.copies.busy:
            return
        self._fork_prefixes(looked_at, owners)
        # The next decode step may open a page for every running request.
        report = self._reclaimer.step(
            sealed_upto=sealed, pressure=self._under_pressure(), reserve_pages=len(owners)
        )
        self.statistics.add_step(report)
        self._forks.given_up()
        self._account_all()
        if self._config.copy == "sync":
            self._reclaimer.copies.wait(COPY_TIMEOUT)
        if self._config.check:
            self.assert_healthy()

    def _prune_if_due(self, request: Any, sealed_len: int) -> bool:
        """Look for victims if it is time to and kill those that were found; whether it did any."""
        state = self._options_of(request)
        kv = request.kv
        row = kv.req_pool_idx
        looked = not self._looks.waiting(row) and self._looks.begin(
            request, state, sealed_len, self._live_positions
        )
        victims = self._looks.arrived(row, kv)
        if victims is None:
            return looked
        if state.options.shared == "skip":
            shared = victims < kv.cache_protected_len
            # Decided as under every other strategy, but tree-owned pages are left as they are.
            state.skipped = np.concatenate([state.skipped, victims[shared]])
            victims = victims[~shared]
        if victims.size:
            self._kill(request, victims)
        return True

    def _live_positions(self, state: PrunedRequest, kv: Any) -> NDArray[np.int64]:
        """Positions the policy still counts as alive, ascending."""
        table = self._table_of(kv.req_pool_idx)
        positions = np.arange(kv.kv_committed_len, dtype=np.int64)
        alive = np.ones(len(positions), np.bool_) if table is None else table.alive(positions)
        alive[state.skipped] = False
        return positions[alive]

    def _fork_prefixes(self, looked_at: list[Any], owners: list[Any]) -> None:
        """Copy-on-write for the requests whose kept set may just have changed."""
        forking = [r for r in looked_at if self._options_of(r).options.shared in ("cow", "auto")]
        if not forking or not self._config.reclaims:
            return
        pruning = {row for row, state in self._requests.items() if state.options.prunes}
        holders = self._forks.holders(owners, pruning)
        pressure = self._under_pressure()
        for request in forking:
            self._forks.consider(
                request,
                self._options_of(request).options.shared,
                holders,
                free_pages=self._pool.free_pages(),
                pressure=pressure,
            )

    def _kill(self, request: Any, victims: NDArray[np.int64]) -> None:
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
        self._reclaimer.evict_tokens(row, victims)
        self.statistics.add_kills(request.rid, kv.kv_committed_len, victims)

    # -- the life of a request ------------------------------------------------------------------

    def on_queued(self, request: Any) -> None:
        """A request enters the waiting queue: keep its prompt out of the tree if it says so."""
        options = self._resolve(request)
        if options.prunes and options.publish == "never":
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
        # Often inside SGLang's free group, which keeps the ids until it ends.
        self._allocator.free_page_ids(torch.from_numpy(pages).to(self._allocator.device))
        kv.kv_reclaimed_tokens = self._page_ceil(kv.kv_allocated_len) - kv.cache_protected_len

    def forget_row(self, row: int) -> None:
        """The row went back to the pool (finish, abort or retraction): forget all kills."""
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
        # A flush is refused while requests run, but their finished copies were flipped above.
        self._forks.given_up()
        self._account_all()

    def orphaned_tokens(self) -> int:
        """Tokens in destinations of copies whose request has ended (they are in no record)."""
        orphaned = sum(len(pages) for pages, _ in self._reclaimer.copies.orphans)
        return orphaned * self._page_size

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
        tables = [t for t in map(self._table_of, self._requests) if t is not None]
        return {
            **self.statistics.as_dict(),
            "pruned_rows": len(tables),
            "held_pages": self._reclaimer.held_pages(),
            "retained_pages": sum(t.ledger.pages_held for t in tables),
            "live_private_tokens": sum(t.live_len - t.tree_owned_live() for t in tables),
            "forks": self._forks.describe(),
        }

    # -- helpers --------------------------------------------------------------------------------

    def _identity(self, row: Row) -> tuple[Generation, object]:
        state = self._requests.get(row)
        record = None if state is None else state.record
        return Generation(int(self._rows.req_generation[row])), record

    def _table_of(self, row: int) -> TokenTable | None:
        return self._reclaimer.table(Row(row))

    def _publishes(self, request: Any) -> bool:
        return self._options_of(request).options.publish != "never"

    def _options_of(self, request: Any) -> PrunedRequest:
        row = request.kv.req_pool_idx
        state = self._requests.get(row)
        if state is None:
            state = self._requests[row] = PrunedRequest(request.kv, self._resolve(request))
        return state

    def _resolve(self, request: Any) -> RequestOptions:
        custom = request.sampling_params.custom_params or {}
        return RequestOptions.resolve(self._config, custom.get("vtoken"))

    def _account_all(self) -> None:
        """Tell SGLang's records what each pruned row holds now.

        All of them: a finished copy is flipped for rows that were not worked on, too.
        """
        for row, state in self._requests.items():
            if not state.released and (table := self._table_of(row)) is not None:
                self._account(state.record, table)

    def _account(self, kv: Any, table: TokenTable) -> None:
        # Against the length that the table knows: SGLang may have allocated more since (the chunk
        # in flight of a row that was not worked on), and none of that was given back.
        known = self._page_ceil(table.logical_len) - kv.cache_protected_len
        held = self._reclaimer.private_pages(table.row) * self._page_size
        kv.kv_reclaimed_tokens = known - held

    def _page_ceil(self, length: int) -> int:
        return -(-length // self._page_size) * self._page_size

    def _under_pressure(self) -> bool:
        total = self._scheduler.max_total_num_tokens
        return self._pool.free_pages() * self._page_size < total * PRESSURE_FREE_SHARE
