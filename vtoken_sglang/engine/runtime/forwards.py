"""What a forward is told before its metadata is made: live lengths, and what is observed of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vtoken_sglang.engine.attention import live_lengths
from vtoken_sglang.engine.observe import forward_link
from vtoken_sglang.engine.observe.observer import ForwardLane
from vtoken_sglang.engine.runtime.runtime import Runtime

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def install(runtime: Runtime, device: torch.device) -> None:
    """Prepare every later forward of this process. Raises HookError if SGLang is not patched."""
    if device.type == "cuda":
        live_lengths.install(lambda row: int(runtime.reclaimer.evicted_counts[row]))

    def prepare(plan: KVLocPlan, batch: ScheduleBatch, forward_batch: ForwardBatch) -> None:
        is_decode = forward_batch.forward_mode.is_decode()
        lanes = forward_lanes(runtime, batch, is_decode)
        forward = runtime.observer.prepare(lanes, is_decode, forward_batch.req_pool_indices)
        if forward is not None:
            forward_link.attach(plan, runtime.observer, forward)

    live_lengths.add(prepare)


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
