"""Live lengths of a forward, kept by its `KVLocPlan`.

    scheduler thread, after the safe point, before the forward:
      ForwardBatch.init_new -> plan.bind -> measure (here) -> plan.kv_lens
        lens        = seq_lens - evicted        of a row, from the host's token tables
        prefix_lens = prefix_lens - evicted     an extend's own tokens are all alive

The plan is made per forward and reaches the backend in every mode, the replay of a captured graph
included. Rows change only at the safe point, so what the host counts is what the device will find
in the row. A batch without evicted tokens has None, and takes SGLang's own path. Lengths go to the
device in one upload from pinned memory; nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vtoken_sglang.errors import InvariantError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLengths:
    """Key/value lengths of a forward's lanes, its own tokens included.

    Fields:
        lens: int64 [lanes], on the forward's device: logical length less evicted tokens.
        lens_cpu: the same on the host; None where the batch has no lengths there.
        prefix_lens: int64 [lanes], on the device: live tokens before an extend's own; None for a
            decode.
        prefix_lens_cpu: the same on the host.
    """

    lens: torch.Tensor
    lens_cpu: torch.Tensor | None
    prefix_lens: torch.Tensor | None
    prefix_lens_cpu: torch.Tensor | None


def live_lengths(plan: KVLocPlan | None) -> LiveLengths | None:
    """What was measured for the plan's forward; None: every token of it is live. A plan that a
    runner makes for its own buffers was never measured."""
    found: LiveLengths | None = getattr(plan, "kv_lens", None)
    return found


def measure(
    batch: ScheduleBatch, forward_batch: ForwardBatch, evicted_count: Callable[[int], int]
) -> LiveLengths | None:
    """Live lengths of the requests of `batch`; None if none of them has evicted tokens.

    Args:
        evicted_count: row -> evicted tokens of its request, as of the last safe point; 0 for a row
            without a token table. Host only.

    Raises:
        InvariantError: a request counts more evicted tokens than its sequence has before this
            forward's own; host and row disagree, and attention would read the wrong tokens.
    """
    rows = [request.kv.req_pool_idx for request in batch.reqs]
    evicted = [evicted_count(row) for row in rows]
    if not any(evicted):
        return None
    seq_lens: torch.Tensor = forward_batch.seq_lens
    seq_lens_cpu: torch.Tensor | None = forward_batch.seq_lens_cpu
    extend = not forward_batch.forward_mode.is_decode_or_idle()
    prefix_lens = [int(length) for length in batch.prefix_lens] if extend else None
    _check(rows, evicted, prefix_lens, seq_lens_cpu)

    lines = [evicted]
    if prefix_lens is not None:
        lines.append([prefix - gone for prefix, gone in zip(prefix_lens, evicted, strict=True)])
    host = torch.tensor(lines, dtype=torch.int64, pin_memory=seq_lens.is_cuda)
    device = host.to(seq_lens.device, non_blocking=True)
    return LiveLengths(
        lens=seq_lens - device[0],
        lens_cpu=None if seq_lens_cpu is None else seq_lens_cpu - host[0],
        prefix_lens=device[1] if extend else None,
        prefix_lens_cpu=host[1] if extend else None,
    )


def _check(
    rows: list[int],
    evicted: list[int],
    prefix_lens: list[int] | None,
    seq_lens_cpu: torch.Tensor | None,
) -> None:
    if prefix_lens is None:
        if seq_lens_cpu is None:
            return
        prefix_lens = [int(length) - 1 for length in seq_lens_cpu.tolist()]
    for row, gone, prefix in zip(rows, evicted, prefix_lens, strict=True):
        if not 0 <= gone <= prefix:
            raise InvariantError(
                f"row {row}: {gone} evicted tokens, but only {prefix} before this forward's own"
            )
