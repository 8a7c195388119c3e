"""What pruned requests hold, for SGLang's records, for admission and for whoever asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vtoken_sglang.core.footprint import page_ceil, settled_tokens
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.engine.admission.budget import FootprintBudget
from vtoken_sglang.engine.admission.demand import Demand, pinned_tokens
from vtoken_sglang.engine.request_state import RequestState
from vtoken_sglang.engine.statistics import Statistics

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


def private_tokens(kv: ReqKvInfo, table: TokenTable, private_pages: int) -> int:
    """Tokens of the pages that a pruned request holds outside the tree. `private_pages`: of its
    ledger, and destinations held for it; SGLang may have allocated more since the table last caught
    up (the chunk in flight of a row that was not worked on)."""
    size = table.page_size
    newer = page_ceil(kv.kv_allocated_len, size) - page_ceil(table.logical_len, size)
    return private_pages * size + newer


def prefill_budget(
    demand: Demand,
    statistics: Statistics,
    allocator: BaseTokenToKVPoolAllocator,
    tree_cache: BasePrefixCache,
    mixed_tokens: int,
) -> FootprintBudget:
    """What an admission pass may take; `mixed_tokens`: of a decode batch mixed in."""
    demand.measure()
    return FootprintBudget(
        allocator,
        tree_cache,
        demand=demand,
        statistics=statistics,
        num_mixed_decode_tokens=mixed_tokens,
    )


def footprint(demand: Demand, states: Iterable[RequestState]) -> dict[str, int]:
    """Tokens of private pages of the requests pruned now: as expected at their length, as held, and
    as it would be with nothing given back. Destinations of pending copies are left out."""
    expected = actual = full = 0
    for state in states:
        if (table := state.table) is None:
            continue
        size = table.page_size
        pinned = pinned_tokens(state.options, table.protected_len)
        expected += settled_tokens(demand.rule(state.options), table.logical_len, pinned)
        actual += table.ledger.pages_held * size
        full += page_ceil(table.logical_len, size) - table.protected_len
    return {"expected_tokens": expected, "actual_tokens": actual, "full_tokens": full}
