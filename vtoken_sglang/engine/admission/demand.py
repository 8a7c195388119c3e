"""Reclaimed memory as concurrency: what requests are expected to hold. The numbers come from
`core.footprint`; SGLang's records say what is held now.

With `admission` "full" SGLang's own formulas stay in force, which charge every request its whole
length. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.managers.scheduler_components.pool_stats_observer import kv_private_tokens

from vtoken_sglang.core.footprint import (
    CHUNKS_IN_FLIGHT,
    Footprint,
    Prefill,
    PruneRule,
    expected_footprint,
    expected_growth,
    fork_cost,
    page_ceil,
)
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import LAG, ReclaimSettings, page_floor
from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy.base import Gather
from vtoken_sglang.policy.eviction import live_after_eviction
from vtoken_sglang.policy.registry import load_policy

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler

# Decode steps until what a new request holds too much comes back. Work takes effect up to two safe
# points after it starts: the first eviction, then the copies that empty pages because of it.
STEPS_UNTIL_PRUNED = 2 * LAG
MAX_WASTE = 0.9
# A private prompt is evicted from at most every so many tokens, and so often in a whole pool.
MAX_PROMPT_INTERVAL = 2048
PROMPT_INTERVALS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """What one waiting request is charged.

    Fields:
        footprint: in tokens of the pool.
        fork: tokens that must be free after its prefill so that it can leave the tree.
        chunk: tokens to compute per step; None without chunking.
    """

    footprint: Footprint
    fork: int
    chunk: int | None


class Demand:
    """What admission, the running reserve and the length limits ask.

    Fields:
        tokens: what one request may hold of the pool.
        waste: share of the retained pages that is expected to be evicted; as measured before each
            admission, `max_waste` while nothing is pruned.
        expects: whether admission goes by what is expected.
        stalled: the chunked request found no room for its next chunk in the last pass.
        changed: the first eviction of a request was decided in this safe point. By then its prompt
            is in the tree and what it will hold is known: those that wait may need less than when
            they were refused. Later ones show in the free pages.
        deferred: a request was refused because the prompt of another is computed in chunks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: VTokenConfig,
        options_of: Callable[[Req], RequestOptions],
        tables: Callable[[], Iterable[TokenTable]],
        fork_wanted: Callable[[int], int | None] = lambda row: None,
    ) -> None:
        """`fork_wanted`: row -> pages of a fork that would pay, had the pool as many."""
        self._scheduler = scheduler
        self._fork_wanted = fork_wanted
        self._reclaims = config.reclaims
        self._options_of, self._tables = options_of, tables
        self.page_size: int = scheduler.token_to_kv_pool_allocator.page_size
        # A page of slack: SGLang wants strictly more than what it charges.
        total = page_floor(scheduler.max_total_num_tokens, self.page_size)
        self.tokens: int = total - self.page_size
        self.max_waste = min(config.repack_threshold + ReclaimSettings().hysteresis, MAX_WASTE)
        self.waste = self.max_waste
        self.expects = config.admission == "expected" and config.reclaims
        self.stalled = self.changed = self.deferred = False

    def measure(self) -> None:
        """Take the waste of all pruned requests together as what is expected of the next ones."""
        places = live = 0
        for table in self._tables():
            places += table.ledger.sealed_pages * self.page_size
            live += table.ledger.sealed_live
        self.waste = min(1 - live / places, self.max_waste) if places else self.max_waste

    def reopens(self, freed: bool) -> bool:
        """Whether those that wait are to be asked again: memory came back, prefixes to hit did, or
        the prompt whose chunks held them up is computed."""
        ended = self.deferred and self._scheduler.chunked_req is None
        self.deferred &= not ended
        return self.expects and (freed or self.changed or ended)

    def options(self, request: Req) -> RequestOptions | None:
        """Options of a request whose pages are given back early; None for any other."""
        options = self._options_of(request)
        return options if options.prunes and self._reclaims else None

    def rule(self, options: RequestOptions, waste: float | None = None) -> PruneRule:
        """The rule in force; with the largest waste there may be, or the one measured now."""
        rule = _rule(options, self.page_size)
        return rule.with_waste(self.waste if waste is None else waste)

    def publishes(self, request: Req) -> bool:
        """Whether the tree takes over the prompt of a request that was not pruned yet."""
        tree = self._scheduler.tree_cache
        return not request.skip_radix_cache_insert and not getattr(tree, "disable", False)

    def charge(self, request: Req, chunk: int | None) -> Charge | None:
        """What to charge a waiting request; None if SGLang's own charge is right.

        `chunk`: maximum tokens of the next chunk. Call with its prefix matched.
        """
        options = self.options(request)
        if options is None:
            return None
        rule = self.rule(options)
        length = len(request.full_untruncated_fill_ids)
        published = self.publishes(request)
        cached = page_floor(request.prefix_len, self.page_size)
        forks = published and _expects_fork(options, rule, length, cached)
        interval = self.prompt_interval(request)
        if interval and chunk is not None:
            chunk = min(chunk, interval - request.prefix_len % interval)
        case = Prefill(
            length=length,
            cached=cached,
            new=_remaining(request),
            published=published,
            forks=forks,
            chunk=interval if interval and chunk is not None else None,
        )
        fork = fork_cost(rule, length) if forks else 0
        return Charge(footprint=expected_footprint(rule, case), fork=fork, chunk=chunk)

    def prompt_interval(self, request: Req) -> int:
        """Tokens between two evictions from a private prompt while it is computed, page multiple; 0
        for a prompt that is not pruned before its end.

        It follows from the request and the size of the pool alone, and chunks end at its multiples:
        what is evicted depends neither on the chunk size nor on who runs beside.
        """
        options = self.options(request)
        if options is None or self.publishes(request) or waits_for_prompt_end(options):
            return 0
        if self._scheduler.chunked_prefill_size is None:
            return 0
        interval = min(MAX_PROMPT_INTERVAL, self.tokens // PROMPT_INTERVALS)
        if self.outgrows(request):  # it must fit in: its chunks in flight beside what is kept
            length = len(request.origin_input_ids) + (request.sampling_params.max_new_tokens or 0)
            kept = self.rule(options, self.max_waste).bound(length) + self.page_size
            interval = min(interval, (self.tokens - kept) // CHUNKS_IN_FLIGHT)
        return max(self.page_size, page_floor(interval, self.page_size))

    def growth(self, request: Req, ratio: float) -> int | None:
        """Further tokens a request with a row is expected to take; None if SGLang's own reserve is
        right. `ratio`: SGLang's share of the remaining tokens that will really be generated."""
        options = self.options(request)
        if options is None:
            return None
        kv = request.kv
        protected, private = kv.cache_protected_len, kv_private_tokens(kv, self.page_size)
        to_come = 0  # of the prompt, for the tree: chunks that were not computed yet
        if self.publishes(request):  # the checkpoint after its prefill is still to come
            prompt = page_floor(len(request.origin_input_ids), self.page_size)
            computed = max(protected, min(prompt, kv.kv_allocated_len))
            private -= computed - protected
            protected = max(protected, prompt)
            to_come = protected - computed
        pinned = pinned_tokens(options, protected)
        ratio = 1.0 if request.sampling_params.ignore_eos else ratio
        remaining = int(_remaining(request) * ratio) + 1
        length = max(kv.kv_allocated_len, len(request.origin_input_ids))
        grown = expected_growth(
            self.rule(options), length=length, remaining=remaining, pinned=pinned, private=private
        )
        if pinned or not protected:
            return to_come + grown
        return min(grown, max(remaining + self.page_size, fork_cost(self.rule(options), length)))

    def fork_headroom(self, requests: Iterable[Req]) -> int:
        """Tokens that the dearest fork still to come needs for a moment."""
        dearest = 0
        for request in requests:
            options = self.options(request)
            pages = self._fork_wanted(request.kv.req_pool_idx)
            if pages is not None:
                dearest = max(dearest, pages * self.page_size)
            elif options is not None and self._will_fork(request, options):
                length = request.kv.kv_allocated_len
                dearest = max(dearest, fork_cost(self.rule(options), length))
        return dearest

    def _will_fork(self, request: Req, options: RequestOptions) -> bool:
        """Whether a running request is expected to leave the tree by copy-on-write yet, though it
        did not find so itself. Under auto, once evicted from, it has forked, does not want to, or
        waits for pages that it named."""
        fresh = self.publishes(request)
        if not fresh and (options.shared == "auto" or not request.kv.cache_protected_len):
            return False
        length = len(request.origin_input_ids)
        return _expects_fork(options, self.rule(options), length, request.cached_tokens)

    def soon_opened(self, requests: Iterable[Req], steps: int = STEPS_UNTIL_PRUNED) -> int:
        """Tokens of pages that these requests open within `steps` decode steps."""
        size = self.page_size
        lengths = [request.kv.kv_committed_len for request in requests]
        return sum(page_ceil(at + steps, size) - page_ceil(at, size) for at in lengths)

    def outgrows(self, request: Req) -> bool:
        """Whether a request may become longer than the pool is."""
        limit = request.sampling_params.max_new_tokens or 0
        return len(request.origin_input_ids) + limit >= self.tokens


def pinned_tokens(options: RequestOptions, protected: int) -> int:
    """Of `protected` tree-owned tokens, those that a request is taken to keep locked.

    Under auto a fork is optional, and those that must fork to give back more than they take find
    room together: what stays free without it is enough. Under cow it comes, whatever others hold.
    """
    return 0 if options.shared == "cow" else protected


@lru_cache(maxsize=1024)
def _rule(options: RequestOptions, page_size: int) -> PruneRule:
    return PruneRule(
        target=partial(live_after_eviction, options),
        protected=options.sink,
        interval=options.interval,
        page_size=page_size,
        waste=0.0,
    )


def waits_for_prompt_end(options: RequestOptions) -> bool:
    """Whether a policy prunes a prompt only when the whole of it was computed."""
    observation = load_policy(options.policy, options.policy_args).observation()
    return observation is not None and observation.gather is Gather.PROMPT_END


def _expects_fork(options: RequestOptions, rule: PruneRule, length: int, cached: int) -> bool:
    """Whether a request leaves the tree by copy-on-write when it is pruned: under cow always, under
    auto where what the cache did not hold of its prompt, and nobody else may hold either, is more
    than a fork takes."""
    own = page_floor(length, rule.page_size) - cached
    return options.shared == "cow" or options.shared == "auto" and own > fork_cost(rule, length)


def _remaining(request: Req) -> int:
    """Tokens still to be generated, clipped as SGLang clips its own estimate."""
    left = request.sampling_params.max_new_tokens - len(request.output_ids)
    return min(max(left, 0), CLIP_MAX_NEW_TOKENS)
