"""SGLang's memory budget of one prefill pass, with pruned requests charged what they will hold.

Two conditions take the place of SGLang's one, because a pruned request holds more during its
prefill than afterwards:

    now    what it holds until it is first pruned fits into what is free after this pass, beside
           the pages that running requests open meanwhile and the dearest copy-on-write to come
    later  what it holds afterwards fits beside what the running requests will still take

An unpruned request is charged its whole length as ever, against the smaller reserve of the others.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from vtoken_sglang.engine.admission.demand import Capacity, Charge
from vtoken_sglang.engine.statistics import Statistics


class FootprintBudget(PrefillBudget):
    """One pass. `consider` names the request that the next calls are about.

    Fields:
        stock_running: what SGLang would reserve for the running requests, tokens.
    """

    def __init__(
        self,
        allocator: Any,
        tree_cache: Any,
        *,
        capacity: Capacity,
        statistics: Statistics,
        num_mixed_decode_tokens: int = 0,
    ) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self._capacity, self._statistics = capacity, statistics
        self._request: Any = None
        self._running: list[Any] = []
        self._alone = False
        self._around: tuple[int, int] | None = None
        self._charge: Charge | None = None
        self._by_pruning = False
        self._held_back = False
        self.stock_running = 0.0
        self._stock_pending = 0

    def consider(self, request: Any, running: list[Any], alone: bool) -> None:
        """The next calls are about `request`; `running`: requests that decode. `alone`: neither
        they nor anything admitted in this pass hold memory that could come back."""
        self._request, self._running, self._alone = request, running, alone
        self._charge = None
        self._by_pruning = False

    # -- a waiting request ----------------------------------------------------------------------

    def check_prefill(
        self,
        *,
        extend_input_len: int,
        total_tokens: int,
        max_new_tokens: int,
        input_tokens: int,
        swa_host_hit_length: int,
        chunk_limit: int | None,
        auxiliary_swa_host_hit_length: int = 0,
    ) -> tuple[bool, int | None]:
        if self._held_back:
            return False, None  # a chunk waits for room: whoever came later waits, too
        left = self.remaining_current
        self._charge = charge = self._capacity.charge(self._request, chunk_limit)
        if charge is None:
            whole = self.ceil_paged_tokens(extend_input_len) + self.page_size
            fits = total_tokens < self.remaining_total and whole <= left
            return (True, chunk_limit) if fits else (False, None)
        soon, fork = self._beside()
        fork = max(charge.fork, fork)
        if fork:  # a fork leaves a page to each running request, this one included
            soon = max(soon, (len(self._running) + 1) * self.page_size)
        needed = charge.footprint.prefill + fork + soon
        fits = needed <= left and charge.footprint.settled < self.remaining_total
        if not fits and self._alone:
            # Nobody will give anything back: what can be computed now must be.
            fits = charge.footprint.prefill <= left
        if not fits:
            return False, None
        stock_left = self._available_and_evictable() - self.stock_running - self._stock_pending
        self._by_pruning = total_tokens >= stock_left
        return True, charge.chunk

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        extra_tokens: int = 0,
        chunk_limit: int | None = None,
        is_chunked_continuation: bool = False,
    ) -> None:
        immediate = self.ceil_paged_tokens(extend_input_len) + self.page_size + extra_tokens
        self._stock_pending += immediate + max_new_tokens
        self.current_offset += immediate
        self.total_offset += self._expected(immediate + max_new_tokens, is_chunked_continuation)
        if self._by_pruning:
            self._statistics.admitted_by_pruning += 1
            self._by_pruning = False

    def _expected(self, full: int, continues: bool) -> int:
        if self._charge is not None:
            return self._charge.footprint.settled
        grown = self._capacity.growth(self._request, 1.0) if continues else None
        return full if grown is None else min(full, grown)

    def _beside(self) -> tuple[int, int]:
        """Pages that running requests open soon, and the dearest fork of theirs, in tokens."""
        if self._around is None:
            soon = self._capacity.soon_opened(self._running)
            self._around = soon, self._capacity.fork_headroom(self._running)
        return self._around

    # -- the next chunk of a prompt -------------------------------------------------------------

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """SGLang goes on with a whole chunk when its estimate is used up. Here a chunk takes what
        is free, and none if that is less than a page: the request is pruned and others finish."""
        free = int(self.remaining_current) - self.page_size
        left = len(self._request.full_untruncated_fill_ids) - self._request.prefix_len
        self._capacity.stalled = False
        if free >= min(chunk_limit, self.ceil_paged_tokens(left)):
            return chunk_limit
        self._held_back = True
        if free >= self.page_size:
            return free // self.page_size * self.page_size
        self._capacity.stalled = True
        self._statistics.stalled_chunks += 1
        return None
