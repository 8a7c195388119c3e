"""What pruned requests hold, told to SGLang's records and to whoever asks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vtoken_sglang.core.footprint import page_ceil, settled_tokens
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.engine.admission.demand import Capacity, pinned_tokens
from vtoken_sglang.engine.request_state import RequestState

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ReqKvInfo


def account(kv: ReqKvInfo, table: TokenTable, private_pages: int) -> None:
    """Tell SGLang's record what its request has given back. `private_pages`: pages of its ledger
    and destinations held for it.

    Against the length that the table knows: SGLang may have allocated more since (the chunk in
    flight of a row that was not worked on), and none of that was given back.
    """
    size = table.page_size
    known = page_ceil(table.logical_len, size) - kv.cache_protected_len
    kv.kv_reclaimed_tokens = known - private_pages * size


def footprint(capacity: Capacity, states: Iterable[RequestState]) -> dict[str, int]:
    """Tokens of private pages of the requests pruned now: as expected at their length, as held, and
    as it would be with nothing given back. Destinations of pending copies are left out."""
    expected = actual = full = 0
    for state in states:
        if (table := state.table) is None:
            continue
        size = table.page_size
        pinned = pinned_tokens(state.options, table.protected_len)
        expected += settled_tokens(capacity.rule(state.options), table.logical_len, pinned)
        actual += table.ledger.pages_held * size
        full += page_ceil(table.logical_len, size) - table.protected_len
    return {"expected_tokens": expected, "actual_tokens": actual, "full_tokens": full}
