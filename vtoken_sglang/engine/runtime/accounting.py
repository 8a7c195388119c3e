"""What pruned requests hold, for whoever asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vtoken_sglang.core.footprint import page_ceil, settled_tokens
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.engine.admission.budget import FootprintBudget
from vtoken_sglang.engine.admission.demand import Capacity, pinned_tokens
from vtoken_sglang.engine.statistics import Statistics
from vtoken_sglang.options import RequestOptions

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


@dataclass(slots=True)
class PrunedRequest:
    """Policy state of one request that may be pruned.

    Fields:
        record: SGLang's `ReqKvInfo` of the request, its identity.
        options: what holds for this request.
        last_len: logical length at the last look for evicted; 0 before the first, and again after
            a retraction, which forgets every eviction.
        skipped: tree-owned positions that are decided dead but left alone (strategy `skip`).
        failed: its policy did, so it ends and is not looked at again.
        released: its row went back to SGLang; nothing of it may be freed again.
    """

    record: Any
    options: RequestOptions
    last_len: int = 0
    released: bool = False
    failed: bool = False
    skipped: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def private_tokens(kv: ReqKvInfo, table: TokenTable, private_pages: int) -> int:
    """Tokens of the pages that a pruned request holds outside the tree. `private_pages`: of its
    ledger, and destinations held for it; SGLang may have allocated more since the table last caught
    up (the chunk in flight of a row that was not worked on)."""
    size = table.page_size
    newer = page_ceil(kv.kv_allocated_len, size) - page_ceil(table.logical_len, size)
    return private_pages * size + newer


def prefill_budget(
    capacity: Capacity,
    statistics: Statistics,
    allocator: BaseTokenToKVPoolAllocator,
    tree_cache: BasePrefixCache,
    mixed_tokens: int,
) -> FootprintBudget:
    """What an admission pass may take; `mixed_tokens`: of a decode batch mixed in."""
    capacity.measure()
    return FootprintBudget(
        allocator,
        tree_cache,
        capacity=capacity,
        statistics=statistics,
        num_mixed_decode_tokens=mixed_tokens,
    )


def footprint(
    capacity: Capacity, requests: Iterable[PrunedRequest], tables: Iterable[TokenTable]
) -> dict[str, int]:
    """Tokens of private pages of the requests pruned now: as expected at their length, as held, and
    as it would be with nothing given back. Destinations of pending copies are left out."""
    options = {id(state.record): state.options for state in requests}
    expected = actual = full = 0
    for table in tables:
        size, own = table.page_size, options[id(table.record)]
        pinned = pinned_tokens(own, table.protected_len)
        expected += settled_tokens(capacity.rule(own), table.logical_len, pinned)
        actual += table.ledger.pages_held * size
        full += page_ceil(table.logical_len, size) - table.protected_len
    return {"expected_tokens": expected, "actual_tokens": actual, "full_tokens": full}
