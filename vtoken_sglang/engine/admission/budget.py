"""SGLang's memory budget of one prefill pass, with pruned requests charged what they will hold.

Two conditions take the place of SGLang's one, because a pruned request holds more during its
prefill than afterwards:

    now    what it holds until it is first pruned fits into what is free after this pass, beside
           the pages that running requests open meanwhile and the dearest copy-on-write to come
    later  what it holds afterwards fits beside what the running requests will still take

An unpruned request is charged its whole length as ever, against the smaller reserve of the others.

SGLang's `PrefillAdder` does not tell its budget which request it asks about. While it adds one, it
is lent a view of the budget that knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from vtoken_sglang.engine.admission.demand import Charge, Demand
from vtoken_sglang.engine.statistics import Statistics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


class FootprintBudget(PrefillBudget):
    """One pass over all waiting requests.

    Fields:
        stock_running, stock_admitted: what SGLang would reserve for the running requests and for
            those admitted in this pass, tokens.
        held_back: a chunk waits for room, and whoever came later waits, too.
    """

    def __init__(
        self,
        allocator: BaseTokenToKVPoolAllocator,
        tree_cache: BasePrefixCache,
        *,
        demand: Demand,
        statistics: Statistics,
        num_mixed_decode_tokens: int = 0,
    ) -> None:
        super().__init__(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
        self.demand, self.statistics = demand, statistics
        self.stock_running = 0.0
        self.stock_admitted = 0
        self.held_back = False
        self._beside: tuple[int, int] | None = None

    @contextmanager
    def lent_for(
        self, request: Req, adder: PrefillAdder, *, has_chunked_req: bool
    ) -> Iterator[None]:
        """While it lasts, `adder` asks about `request`.

        With the prefix cache off, SGLang admits requests of fixed length by playing the growth of
        all through, as if nothing of it were given back. The tree is lent as if it were on, so that
        it asks the budget about them, too.
        """
        running = adder.running_batch.reqs if adder.running_batch is not None else []
        alone = not (running or adder.can_run_list or has_chunked_req)
        tree = adder.tree_cache
        chunking = has_chunked_req or getattr(adder, "new_chunked_req", None) is not None
        adder.memory_budget = RequestBudget(self, request, running, alone, chunking)
        if getattr(tree, "disable", True):
            adder.tree_cache = _EnabledTree(tree)
        try:
            yield
        finally:
            adder.memory_budget, adder.tree_cache = self, tree

    def beside(self, running: Sequence[Req]) -> tuple[int, int]:
        """Pages that running requests open soon, and the dearest fork of theirs, in tokens."""
        if self._beside is None:
            self._beside = self.demand.soon_opened(running), self.demand.fork_headroom(running)
        return self._beside

    @property
    def stock_left(self) -> float:
        """Tokens that SGLang's own estimate would leave."""
        return float(self._available_and_evictable() - self.stock_running - self.stock_admitted)


class RequestBudget:
    """The budget of a pass, for the questions about one request.

    Args:
        running: requests that decode.
        alone: neither they nor anything admitted in this pass hold memory that could come back.
        chunking: another prompt is being computed in chunks. SGLang keeps track of one; as its
            chunk may end early here, there may be room for another, but only for a whole prompt.
    """

    def __init__(
        self,
        budget: FootprintBudget,
        request: Req,
        running: Sequence[Req],
        alone: bool,
        chunking: bool = False,
    ) -> None:
        self._budget, self._request, self._running, self._alone = budget, request, running, alone
        self._chunking = chunking
        self._charge: Charge | None = None
        self._by_pruning = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._budget, name)

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
        """Whether a waiting request is admitted, and the maximum tokens of its next chunk."""
        budget = self._budget
        if budget.held_back:
            return False, None
        left = budget.remaining_current
        self._charge = charge = budget.demand.charge(self._request, chunk_limit)
        limit = chunk_limit if charge is None else charge.chunk
        if self._chunking and limit is not None and input_tokens > limit:
            budget.demand.deferred = True
            return False, None
        if charge is None:
            whole = budget.ceil_paged_tokens(extend_input_len) + budget.page_size
            fits = total_tokens < budget.remaining_total and whole <= left
            return (True, chunk_limit) if fits else (False, None)
        soon, fork = budget.beside(self._running)
        fork = max(charge.fork, fork)
        if fork:  # a fork leaves a page to each running request, this one included
            soon = max(soon, (len(self._running) + 1) * budget.page_size)
        needed = charge.footprint.prefill + fork + soon
        fits = needed <= left and charge.footprint.settled < budget.remaining_total
        if not fits and self._alone:
            # Nobody will give anything back: what can be computed now must be.
            fits = charge.footprint.prefill <= left
        if not fits:
            return False, None
        self._by_pruning = total_tokens >= budget.stock_left
        return True, charge.chunk

    def available_chunk_tokens(self, chunk_limit: int) -> int | None:
        """Maximum tokens of the next chunk of a prompt. SGLang goes on with a whole chunk when its
        estimate is used up. Here a chunk takes what is free, and none if that is less than a page:
        the request is pruned and others finish."""
        budget, demand = self._budget, self._budget.demand
        if interval := demand.prompt_interval(self._request):
            chunk_limit = min(chunk_limit, interval - self._request.prefix_len % interval)
        free = int(budget.remaining_current) - budget.page_size
        left = len(self._request.full_untruncated_fill_ids) - self._request.prefix_len
        demand.stalled = False
        if free >= min(chunk_limit, budget.ceil_paged_tokens(left)):
            return chunk_limit
        budget.held_back = True
        if free >= budget.page_size:
            return free // budget.page_size * budget.page_size
        demand.stalled = True
        budget.statistics.stalled_chunks += 1
        return None

    def reserve(
        self,
        extend_input_len: int,
        max_new_tokens: int,
        *,
        extra_tokens: int = 0,
        chunk_limit: int | None = None,
        is_chunked_continuation: bool = False,
    ) -> None:
        """Charge the pass for the request."""
        budget = self._budget
        immediate = budget.ceil_paged_tokens(extend_input_len) + budget.page_size + extra_tokens
        budget.stock_admitted += immediate + max_new_tokens
        budget.current_offset += immediate
        budget.total_offset += self._expected(immediate + max_new_tokens, is_chunked_continuation)
        budget.statistics.admitted_by_pruning += self._by_pruning

    def _expected(self, full: int, continues: bool) -> int:
        if self._charge is not None:
            return self._charge.footprint.settled
        grown = self._budget.demand.growth(self._request, 1.0) if continues else None
        return full if grown is None else min(full, grown)


class _EnabledTree:
    """A prefix cache that is off, without saying so."""

    disable = False

    def __init__(self, tree: BasePrefixCache) -> None:
        self._tree = tree

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)
