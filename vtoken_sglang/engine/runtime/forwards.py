"""What a forward is told before its metadata is made: live lengths, and what is observed of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken_sglang.engine.attention.live_lengths import LiveLengths, measure
from vtoken_sglang.engine.observe import forward_link
from vtoken_sglang.engine.observe.observer import ForwardLane

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from vtoken_sglang.engine.runtime.runtime import Runtime


def prepare(
    runtime: Runtime, forward_batch: ForwardBatch, batch: ScheduleBatch
) -> LiveLengths | None:
    """Prepare what the layers of a forward, whose plan is bound, will show to the observer. Returns
    its live lengths; None where no token of its requests was evicted."""
    is_decode = forward_batch.forward_mode.is_decode()
    lanes = forward_lanes(runtime, batch, is_decode)
    forward = runtime.observer.prepare(lanes, is_decode, forward_batch.req_pool_indices)
    if forward is not None:
        forward_link.attach(forward_batch.kv_loc_plan, runtime.observer, forward)
    return measure(batch, forward_batch, runtime.reclaimer.evicted_counts.item)


def forward_lanes(runtime: Runtime, batch: ScheduleBatch, is_decode: bool) -> list[ForwardLane]:
    """The lanes of a forward that is being prepared, in batch order."""
    lanes = []
    for index, request in enumerate(batch.reqs):
        end = int(request.kv.kv_committed_len)
        start = end - 1
        if not is_decode:
            start = int(batch.prefix_lens[index])
            end = start + int(batch.extend_lens[index])
        known = len(request.origin_input_ids) + len(request.output_ids)
        lanes.append(ForwardLane(runtime.state_of(request), start, end, prompt_ends=end >= known))
    return lanes
