"""FlashInfer with real plans over compacted rows, against plain attention in float64.

    decode        CUDA-core and tensor-core kernels
    extend        ragged own tokens + paged live prefix merged by lse; paged only
    graph         decode captured once, replayed across a commit of every live token

The lists come from `pack_live`, the host lengths from the same live counts, as in the backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vtoken_sglang.kernels.pack_live import pack_live

from .graphs import Captured
from .rows import Rows, random_rows

WORKSPACE_BYTES = 128 * 2**20
# Relative to values of about 1: half-precision inputs and outputs, float32 sums.
LIMITS = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a comparison runs on.

    Fields:
        lanes, span, own: requests, tokens of the longest, new tokens of each in an extend.
        keep: share of tokens alive.
    """

    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 16
    lanes: int = 8
    span: int = 4096
    own: int = 65
    keep: float = 0.3
    dtype: torch.dtype = torch.bfloat16

    @property
    def heads(self) -> tuple[int, int, int]:
        """(query heads, key heads, dim), as every plan takes them."""
        return self.q_heads, self.kv_heads, self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A pool and pruned rows. `k`, `v`: [num_slots, kv_heads, dim], slots 0..page_size-1 unused."""

    sizes: Sizes
    rows: Rows
    k: torch.Tensor
    v: torch.Tensor

    def lists(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(indptr int32 [bs + 1], live slots int32 [indptr[-1]]) on the device."""
        rows = self.rows
        slots = torch.empty(int(rows.indptr[-1]), dtype=torch.int32, device=self.k.device)
        span = rows.table.shape[1]
        pack_live(rows.table, rows.row_ids, rows.spans, rows.indptr, slots, max_span=span)
        return rows.indptr, slots

    def random(self, tokens: int, heads: int, generator: torch.Generator) -> torch.Tensor:
        """[tokens, heads, dim] in the pool's dtype."""
        shape = (tokens, heads, self.sizes.dim)
        drawn = torch.randn(shape, device=self.k.device, generator=generator)
        return drawn.to(self.sizes.dtype)


def make_pruned(
    sizes: Sizes, device: torch.device, generator: torch.Generator, *, padding: int = 0
) -> Pruned:
    """Fresh random rows and pool."""
    rows = random_rows(
        sizes.lanes,
        sizes.span,
        sizes.keep,
        device,
        generator,
        padding=padding,
        page_size=sizes.page_size,
    )
    num_slots = rows.num_slots + sizes.lanes * (sizes.span + sizes.page_size)
    num_slots = -(-num_slots // sizes.page_size) * sizes.page_size
    shape = (num_slots, sizes.kv_heads, sizes.dim)
    k, v = (torch.randn(shape, device=device, generator=generator).to(sizes.dtype) for _ in "kv")
    return Pruned(sizes=sizes, rows=rows, k=k, v=v)


def plain_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """The last `len(q)` tokens of a lane over all of it, causal, float64. [own, heads, dim]."""
    own, group = len(q), q.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, dim=1) for part in (keys, values))
    logits = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    last_seen = torch.arange(own, device=q.device) + len(keys) - own
    hidden = torch.arange(len(keys), device=q.device)[None, :] > last_seen[:, None]
    weights = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def decode_errors(
    library: Any, pruned: Pruned, generator: torch.Generator
) -> Iterator[tuple[str, float]]:
    """(what, greatest error) of decode with both kernels."""
    sizes = pruned.sizes
    indptr, slots = pruned.lists()
    lanes = len(indptr) - 1
    q = pruned.random(lanes, sizes.q_heads, generator)
    wanted = decode_wanted(pruned, q, indptr, slots)
    for tensor_cores in (False, True):
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace(pruned.k.device), "NHD", backend="fa2", use_tensor_cores=tensor_cores
        )
        plan_decode(wrapper, pruned, indptr, slots)
        out = wrapper.forward(q, (pruned.k, pruned.v), sm_scale=sizes.dim**-0.5)
        kernel = "tensor cores" if tensor_cores else "CUDA cores"
        yield f"decode, {kernel}", greatest(out, wanted)


def extend_errors(
    library: Any, pruned: Pruned, generator: torch.Generator
) -> Iterator[tuple[str, float]]:
    """(what, greatest error) of an extend of `own` tokens over each lane's live prefix."""
    sizes, device = pruned.sizes, pruned.k.device
    indptr, slots = pruned.lists()
    lanes, own = len(indptr) - 1, sizes.own
    q = pruned.random(lanes * own, sizes.q_heads, generator)
    k, v = (pruned.random(lanes * own, sizes.kv_heads, generator) for _ in "kv")
    first = pruned.rows.num_slots
    new_slots = torch.arange(first, first + lanes * own, device=device)
    pruned.k[new_slots], pruned.v[new_slots] = k, v
    bounds, scale = indptr.tolist(), sizes.dim**-0.5
    new = new_slots.view(lanes, own)
    full = [torch.cat([slots[bounds[i] : bounds[i + 1]].long(), new[i]]) for i in range(lanes)]
    wanted = torch.cat(
        [
            plain_attention(q[i * own : (i + 1) * own], pruned.k[full[i]], pruned.v[full[i]], scale)
            for i in range(lanes)
        ]
    )
    qo_indptr = torch.arange(lanes + 1, dtype=torch.int32, device=device) * own
    types = {"q_data_type": sizes.dtype}
    ragged = library.BatchPrefillWithRaggedKVCacheWrapper(workspace(device), "NHD", backend="fa2")
    ragged.begin_forward(qo_indptr, qo_indptr, *sizes.heads, **types)
    paged = library.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", backend="fa2")
    ones = torch.ones(lanes, dtype=torch.int32, device=device)
    types["kv_data_type"] = sizes.dtype
    paged.begin_forward(qo_indptr, indptr, slots, ones, *sizes.heads, 1, **types)
    own_part = ragged.forward_return_lse(q, k, v, causal=True, sm_scale=scale)
    pool = (pruned.k, pruned.v)
    prefix_part = paged.forward_return_lse(q, pool, causal=False, sm_scale=scale)
    out, _ = library.merge_state(*own_part, *prefix_part)
    yield "extend, ragged and paged", greatest(out, wanted)

    full_indptr = (indptr + qo_indptr).to(torch.int32)
    flat = torch.cat(full).to(torch.int32)
    paged.begin_forward(qo_indptr, full_indptr, flat, ones, *sizes.heads, 1, **types)
    out = paged.forward(q, pool, causal=True, sm_scale=scale)
    yield "extend, paged only", greatest(out, wanted)


def graph_commit_mismatches(
    library: Any, sizes: Sizes, device: torch.device, generator: torch.Generator
) -> tuple[int, float]:
    """Capture decode with padded lanes, replay it, move every live token, replay it again.

    Returns:
        (lanes of the two replays that differ in any bit, greatest error against plain attention).
    """
    pruned = make_pruned(sizes, device, generator, padding=2)
    lanes = len(pruned.rows.spans)
    room = int(pruned.rows.spans.sum())
    indptr_buffer = torch.zeros(lanes + 1, dtype=torch.int32, device=device)
    indptr_buffer[:] = torch.arange(lanes + 1)
    slots_buffer = torch.zeros(room, dtype=torch.int32, device=device)
    ones = torch.ones(lanes, dtype=torch.int32, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device),
        "NHD",
        backend="fa2",
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=indptr_buffer,
        paged_kv_indices_buffer=slots_buffer,
        paged_kv_last_page_len_buffer=ones,
    )
    types = {"q_data_type": sizes.dtype, "data_type": sizes.dtype}
    # As SGLang captures: every lane is padding of length 1, the sink.
    wrapper.begin_forward(indptr_buffer, slots_buffer, ones, *sizes.heads, 1, **types)
    q = pruned.random(lanes, sizes.q_heads, generator)
    out = torch.empty_like(q)
    scale = sizes.dim**-0.5
    captured = Captured(
        lambda: out.copy_(wrapper.forward(q, (pruned.k, pruned.v), sm_scale=scale)), device
    )
    results, error = [], 0.0
    for commit in (False, True):
        if commit:
            move_everything(pruned, generator)
        indptr, slots = pruned.lists()
        indptr_buffer.copy_(indptr)
        slots_buffer[: len(slots)] = slots
        library.fast_decode_plan(
            wrapper,
            indptr_buffer,
            slots_buffer,
            ones,
            *sizes.heads,
            1,
            global_override_indptr_cpu=indptr.cpu(),
            **types,
        )
        captured.replay()
        results.append(out.clone())
        error = max(error, greatest(out, decode_wanted(pruned, q, indptr, slots)))
    differing = (results[0] != results[1]).flatten(1).any(dim=1)
    return int(differing.sum()), error


def move_everything(pruned: Pruned, generator: torch.Generator) -> None:
    """Copy every live token to a slot behind the rows' own, commit the rows, spoil the old
    slots."""
    from vtoken_sglang.kernels.copy_slots import copy_slots

    table, device = pruned.rows.table, pruned.k.device
    row_ids, positions = torch.nonzero(table, as_tuple=True)
    old = table[row_ids, positions].long()
    order = torch.randperm(len(old), device=device, generator=generator)
    new = pruned.rows.num_slots + order
    copy_slots([pruned.k, pruned.v], old, new)
    table[row_ids, positions] = new.to(torch.int32)
    pruned.k[old], pruned.v[old] = torch.nan, torch.nan


def repacked(pruned: Pruned) -> Pruned:
    """The same live tokens in whole pages of their own, in shuffled pages, rows without holes."""
    size, rows = pruned.sizes.page_size, pruned.rows
    indptr, slots = pruned.lists()
    bounds, device = indptr.tolist(), pruned.k.device
    table = torch.zeros_like(rows.table)
    k, v = pruned.k.clone(), pruned.v.clone()
    counts = [-(-int(length) // size) for length in rows.lens]
    generator = torch.Generator(device).manual_seed(sum(counts))
    free = torch.randperm(len(k) // size - 1, device=device, generator=generator) + 1
    taken = 0
    for lane, row in enumerate(rows.row_ids.tolist()):
        live = slots[bounds[lane] : bounds[lane + 1]].long()
        pages = free[taken : taken + counts[lane], None] * size
        taken += counts[lane]
        new = (pages + torch.arange(size, device=device)).flatten()[: len(live)]
        k[new], v[new] = pruned.k[live], pruned.v[live]
        table[row, : len(live)] = new.to(torch.int32)
    dense = Rows(
        table=table,
        row_ids=rows.row_ids,
        spans=rows.lens,
        lens=rows.lens,
        indptr=indptr,
        num_slots=rows.num_slots,
    )
    return Pruned(sizes=pruned.sizes, rows=dense, k=k, v=v)


def decode_wanted(
    pruned: Pruned, q: torch.Tensor, indptr: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Plain attention of one query token per lane."""
    bounds = indptr.tolist()
    lists = [slots[first:last].long() for first, last in zip(bounds, bounds[1:], strict=False)]
    scale = pruned.sizes.dim**-0.5
    parts = [
        plain_attention(q[lane : lane + 1], pruned.k[live], pruned.v[live], scale)
        for lane, live in enumerate(lists)
    ]
    return torch.cat(parts)


def plan_decode(wrapper: Any, pruned: Pruned, indptr: torch.Tensor, slots: torch.Tensor) -> None:
    """Plan slot lists, page size 1, as SGLang does."""
    sizes = pruned.sizes
    ones = torch.ones(len(indptr) - 1, dtype=torch.int32, device=slots.device)
    types = {"q_data_type": sizes.dtype, "data_type": sizes.dtype}
    wrapper.begin_forward(indptr, slots, ones, *sizes.heads, 1, **types)


def workspace(device: torch.device) -> torch.Tensor:
    """FlashInfer's scratch memory."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def greatest(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Greatest absolute error; infinite if any is NaN."""
    return float((out.double() - wanted).abs().nan_to_num(torch.inf).max())
