"""What pruned requests hold, told to SGLang's records and to whoever asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vtoken_sglang.core.footprint import page_ceil, settled_tokens
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.engine.admission.demand import Demand, pinned_tokens
from vtoken_sglang.options import RequestOptions


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


def account(kv: Any, table: TokenTable, private_pages: int) -> None:
    """Tell SGLang's record what its request has given back. `private_pages`: pages of its ledger
    and destinations held for it.

    Against the length that the table knows: SGLang may have allocated more since (the chunk in
    flight of a row that was not worked on), and none of that was given back.
    """
    size = table.page_size
    known = page_ceil(table.logical_len, size) - kv.cache_protected_len
    kv.kv_reclaimed_tokens = known - private_pages * size


def footprint(
    capacity: Demand, requests: Iterable[PrunedRequest], tables: Iterable[TokenTable]
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
