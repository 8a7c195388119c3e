"""Live lengths of a forward, told to its `KVLocPlan` where the requests are still known.

    scheduler thread, after the safe point, before the forward:
      ForwardBatch.init_new -> plan.bind -> plan.fill_kv_lens -> fill (here)
        dead(row) from the host's token tables
        kv_lens        = seq_lens - dead          logical length minus evicted tokens
        kv_prefix_lens = prefix_lens - dead       an extend's own tokens are all alive

Rows change only at the safe point, so what the host counts is what the device will find in the row.
A batch without evicted tokens keeps `None`, and SGLang's own path. Lengths go to the device in one
upload from pinned memory; nothing waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

from vtoken_sglang.errors import HookError, InvariantError

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

# row -> dead positions of its request; 0 for a row without a token table.
EvictedCount = Callable[[int], int]
# row -> its live slots are whole pages in order, all full but the last.
IsDense = Callable[[int], bool]

_dense_plans: weakref.WeakSet[KVLocPlan] = weakref.WeakSet()


def install(evicted_count: EvictedCount, is_dense: IsDense | None = None) -> None:
    """Fill the lengths of every later forward of this process.

    Args:
        evicted_count: dead positions of a row, as of the last safe point. Host only.
        is_dense: for page-mode plans; asked about rows with evicted tokens only, since a row
            without any is dense as SGLang allocates it. None: such a row never is.

    Raises:
        HookError: SGLang is not patched, or a listener is there already.
    """
    if not hasattr(KVLocPlan, "kv_lens_listener"):
        raise HookError("plan-kv-lens", "SGLang is not patched", "run vtoken-sglang patch --apply")
    if KVLocPlan.kv_lens_listener is not None:
        raise HookError("plan-kv-lens", "another listener is installed")

    def listener(plan: KVLocPlan, batch: ScheduleBatch, forward_batch: ForwardBatch) -> None:
        fill(plan, batch, forward_batch, evicted_count, is_dense)

    KVLocPlan.kv_lens_listener = listener


def add(listener: Callable[[KVLocPlan, ScheduleBatch, ForwardBatch], None]) -> None:
    """Call `listener` for every later forward too, after the lengths were filled.

    Raises:
        HookError: SGLang is not patched.
    """
    if not hasattr(KVLocPlan, "kv_lens_listener"):
        raise HookError("plan-kv-lens", "SGLang is not patched", "run vtoken-sglang patch --apply")
    first = KVLocPlan.kv_lens_listener

    def both(plan: KVLocPlan, batch: ScheduleBatch, forward_batch: ForwardBatch) -> None:
        if first is not None:
            first(plan, batch, forward_batch)
        listener(plan, batch, forward_batch)

    KVLocPlan.kv_lens_listener = both


def uninstall() -> None:
    """Take the listener out, whoever installed it; for tests and for a second scheduler."""
    KVLocPlan.kv_lens_listener = None


def fill(
    plan: KVLocPlan,
    batch: ScheduleBatch,
    forward_batch: ForwardBatch,
    evicted_count: EvictedCount,
    is_dense: IsDense | None = None,
) -> None:
    """Set `plan.kv_lens*` from the requests of `batch`, or leave them None if none has evicted
    tokens.

    Raises:
        InvariantError: a request counts more evicted tokens than its sequence has before this
            forward's own; host and row disagree, and attention would read the wrong tokens.
    """
    rows = [request.kv.req_pool_idx for request in batch.reqs]
    dead = [evicted_count(row) for row in rows]
    if not any(dead):
        return
    seq_lens: torch.Tensor = forward_batch.seq_lens
    seq_lens_cpu: torch.Tensor | None = forward_batch.seq_lens_cpu
    extend = not forward_batch.forward_mode.is_decode_or_idle()
    prefix_lens = [int(length) for length in batch.prefix_lens] if extend else None
    _check(rows, dead, prefix_lens, seq_lens_cpu)

    lines = [dead]
    if prefix_lens is not None:
        lines.append([prefix - gone for prefix, gone in zip(prefix_lens, dead, strict=True)])
    host = torch.tensor(lines, dtype=torch.int64, pin_memory=seq_lens.is_cuda)
    device = host.to(seq_lens.device, non_blocking=True)
    plan.kv_lens = seq_lens - device[0]
    plan.kv_lens_cpu = None if seq_lens_cpu is None else seq_lens_cpu - host[0]
    if prefix_lens is not None:
        plan.kv_prefix_lens, plan.kv_prefix_lens_cpu = device[1], host[1]
    if is_dense is not None:
        pruned = [row for row, gone in zip(rows, dead, strict=True) if gone]
        if all(is_dense(row) for row in pruned):
            _dense_plans.add(plan)


def is_dense_plan(plan: KVLocPlan) -> bool:
    """Whether every lane's live slots are whole pages in order, so that pages can be planned."""
    return plan.kv_lens is None or plan in _dense_plans


def _check(
    rows: list[int],
    dead: list[int],
    prefix_lens: list[int] | None,
    seq_lens_cpu: torch.Tensor | None,
) -> None:
    if prefix_lens is None:
        if seq_lens_cpu is None:
            return
        prefix_lens = [int(length) - 1 for length in seq_lens_cpu.tolist()]
    for row, gone, prefix in zip(rows, dead, prefix_lens, strict=True):
        if not 0 <= gone <= prefix:
            raise InvariantError(
                f"row {row}: {gone} evicted tokens, but only {prefix} before this forward's own"
            )
