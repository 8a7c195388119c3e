"""What a forward is told once its plan is bound: live lengths, and what is observed of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vtoken_sglang.engine.observe import forward_link
from vtoken_sglang.engine.observe.observer import ForwardLane, Observer
from vtoken_sglang.engine.request_state import RequestState

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

StateOf = Callable[["Req"], RequestState]


def observe(
    observer: Observer, state_of: StateOf, batch: ScheduleBatch, forward_batch: ForwardBatch
) -> None:
    """Prepare what the layers of a forward, whose plan is bound, will show to the observer."""
    is_decode = forward_batch.forward_mode.is_decode()
    lanes = forward_lanes(state_of, batch, is_decode)
    forward = observer.prepare(lanes, is_decode, forward_batch.req_pool_indices)
    if forward is not None:
        forward_link.attach(forward_batch.kv_loc_plan, observer, forward)


def forward_lanes(state_of: StateOf, batch: ScheduleBatch, is_decode: bool) -> list[ForwardLane]:
    """The lanes of a forward that is being prepared, in batch order."""
    lanes = []
    for index, request in enumerate(batch.reqs):
        end = int(request.kv.kv_committed_len)
        start = end - 1
        if not is_decode:
            start = int(batch.prefix_lens[index])
            end = start + int(batch.extend_lens[index])
        known = len(request.origin_input_ids) + len(request.output_ids)
        lanes.append(ForwardLane(state_of(request), start, end, prompt_ends=end >= known))
    return lanes
