"""Which requests own rows now, and up to where their tokens may be touched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtoken_sglang.core.types import page_floor
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request whose tokens may be touched at this safe point.

    Fields:
        sealed_len: positions below it are written, in full pages that no forward writes, and not
            needed by SGLang to find the next slot; page multiple.
        evictable_len: positions below it may be evicted now; None: its policy is not asked.
        prompt: its prompt is still being computed.
    """

    state: RequestState
    sealed_len: int
    evictable_len: int | None
    prompt: bool = False


def prunable(
    states: Iterable[RequestState], chunked: Req | None, page_size: int
) -> Iterator[Candidate]:
    """The requests whose tokens may be touched.

    `kv_committed_len - 1` is the last position whose forward was launched: SGLang derives the next
    slot from `row[kv_committed_len - 1]`, so it and its page stay.

    Of a chunked request only what lies before the chunk in flight counts, and only if the prompt is
    not published: a published prompt is pruned after its last chunk has reached the tree. It is
    evicted from where a chunk ends at a multiple of its interval, and the interval before that is
    left alone, which no chunk in flight reaches back beyond.
    """
    for state in states:
        request, length = state.request, state.record.kv_committed_len
        if request.finished():
            continue
        if chunked is not None and request is chunked:
            # After a retraction, too, what was pruned once stays out of the tree.
            if not request.skip_radix_cache_insert:
                continue
            # With no chunk in flight the prefix is all there is: its tail stays open.
            last = min(request.prefix_len, state.record.kv_allocated_len - 1)
            sealed = page_floor(max(last, 0), page_size)
            interval = state.prompt_interval
            at_end = interval > 0 and length % interval == 0 and length > state.evicted_at
            evictable = min(sealed, length - interval) if at_end else None
            yield Candidate(state, sealed, evictable, prompt=True)
        elif request.decode_batch_idx >= 1:
            # Earlier, the checkpoint that publishes the prompt is still to come.
            sealed = page_floor(length - 1, page_size)
            yield Candidate(state, sealed, sealed)
