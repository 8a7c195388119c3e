"""Which requests own rows now, and up to where their tokens may be touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vtoken_sglang.engine.request_state import RequestState

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler


def row_owners(scheduler: Scheduler, *batches: ScheduleBatch | None) -> list[Req]:
    """The distinct requests that hold a row, the chunked one included.

    After a decode SGLang's running and last batch are the same object.
    """
    seen: dict[int, Req] = {}
    chunked = scheduler.chunked_req
    for batch in batches:
        for request in batch.reqs if batch is not None else ():
            seen.setdefault(id(request), request)
    if chunked is not None:
        seen.setdefault(id(chunked), chunked)
    return [request for request in seen.values() if request.kv.holds_kv]


def prunable(
    states: Iterable[RequestState], chunked: Req | None, page_size: int
) -> Iterator[tuple[RequestState, int]]:
    """Yield (request, sealed length): positions below it are written, sealed and not needed by
    SGLang to find the next slot.

    `kv_committed_len - 1` is the last position whose forward was launched: SGLang derives the next
    slot from `row[kv_committed_len - 1]`, so it and its page stay. Of a chunked request only what
    lies before the chunk in flight counts, and only if the prompt is not published: a published
    prompt is pruned after its last chunk has reached the tree.
    """
    for state in states:
        request = state.request
        if request.finished():
            continue
        if chunked is not None and request is chunked:
            # After a retraction, too, what was pruned once stays out of the tree.
            if not request.skip_radix_cache_insert:
                continue
            # With no chunk in flight the prefix is all there is: its tail stays open.
            last = min(request.prefix_len, request.kv.kv_allocated_len - 1)
        elif request.decode_batch_idx >= 1:
            # Earlier, the checkpoint that publishes the prompt is still to come.
            last = request.kv.kv_committed_len - 1
        else:
            continue
        yield state, max(last, 0) // page_size * page_size
