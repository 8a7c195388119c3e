"""Times on a GPU: copying slots, packing rows, decode attention over scattered and packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eval.results import spread
from vtoken_sglang.kernels.copy_slots.triton import copy_slots_triton
from vtoken_sglang.kernels.pack_live.triton import pack_live_triton

from .flashinfer_checks import Pruned, Sizes, make_pruned, plan_decode, repacked, workspace
from .rows import random_rows
from .timing import ratio_figure, times_ms

LAYERS, HEADS, DIM, PAGE = 32, 8, 128, 16
PACKED = ((64, 4_096), (8, 131_072))  # (lanes, span)
DECODED = Sizes(lanes=32, span=8_192)
POOL_SHARE = 0.25  # of the free device memory, for the copied pool
MOVED_SHARE = 0.2  # of the pool's slots, moved by one copy


def copy_figures(
    device: torch.device, repeats: int, seed: int, *, layers: int = LAYERS
) -> dict[str, Any]:
    """`copy_ratio`: the bandwidth of moving slots, as a share of the device's own copy.

    Both read and write the same number of bytes; the slots are those of whole scattered pages
    with holes, as a repack finds them, going to whole pages.
    """
    generator = torch.Generator(device).manual_seed(seed)
    row_bytes = HEADS * DIM * 2
    free = torch.cuda.mem_get_info(device)[0]
    num_pages = int(free * POOL_SHARE) // (row_bytes * 2 * layers * PAGE)
    buffers = [
        torch.zeros(num_pages * PAGE, HEADS, DIM, dtype=torch.bfloat16, device=device)
        for _ in range(2 * layers)
    ]
    order = torch.randperm(num_pages, device=device, generator=generator)
    moved = int(num_pages * PAGE * MOVED_SHARE)
    offsets = torch.arange(PAGE, device=device)
    sources = (order[: num_pages // 2, None] * PAGE + offsets).flatten()
    kept = torch.randperm(len(sources), device=device, generator=generator)[:moved].sort().values
    src = sources[kept]
    targets = (order[num_pages // 2 :, None] * PAGE + offsets).flatten()
    dst = targets[: len(src)]
    ours = times_ms(lambda: copy_slots_triton(buffers, src, dst), repeats)
    half = len(src) * row_bytes * 2 * layers
    flat_from, flat_to = (torch.zeros(half, dtype=torch.uint8, device=device) for _ in range(2))
    device_copy = times_ms(lambda: flat_to.copy_(flat_from), repeats)
    unit = "share of the bandwidth of a device copy of as many bytes"
    rates = spread([2 * half / milliseconds / 1e6 for milliseconds in ours])
    return {
        "copy_ratio": ratio_figure(device_copy, ours, unit),
        "copy_bandwidth": {
            "value": rates.pop("median"),
            "unit": f"GB/s read and written, {len(src)} slots of {2 * layers} buffers",
            "spread": rates,
        },
    }


def pack_figures(
    gather_rows: Callable[..., None] | None,
    device: torch.device,
    repeats: int,
    seed: int,
    *,
    shapes: Sequence[tuple[int, int]] = PACKED,
) -> dict[str, Any]:
    """`pack_live_us_*`: time of `pack_live`; `pack_time_ratio_*`: over `gather_rows`, SGLang's own
    gather of whole rows, where it is at hand."""
    generator = torch.Generator(device).manual_seed(seed)
    figures = {}
    for lanes, span in shapes:
        rows = random_rows(lanes, span, 0.3, device, generator)
        whole = torch.cat([rows.spans.new_zeros(1), rows.spans.cumsum(0)]).to(torch.int32)
        out = torch.empty(int(whole[-1]), dtype=torch.int32, device=device)
        lists = (rows.table, rows.row_ids, rows.spans)
        pack = partial(pack_live_triton, *lists, rows.indptr, out, max_span=span)
        ours = times_ms(pack, repeats)
        what = f"{lanes} rows of {span}, 0.3 alive"
        microseconds = spread([1000 * milliseconds for milliseconds in ours])
        figures[f"pack_live_us_{lanes}x{span}"] = {
            "value": microseconds.pop("median"),
            "unit": f"microseconds, {what}",
            "spread": microseconds,
        }
        if gather_rows is not None:
            theirs = times_ms(partial(gather_rows, *lists, whole, out), repeats)
            unit = f"time, ours / SGLang's index kernel, {what}"
            figures[f"pack_time_ratio_{lanes}x{span}"] = ratio_figure(ours, theirs, unit)
    return figures


def attention_figures(
    library: Any, device: torch.device, repeats: int, seed: int, *, sizes: Sizes = DECODED
) -> dict[str, Any]:
    """Decode attention at 0.3 kept, scattered and repacked."""
    generator = torch.Generator(device).manual_seed(seed)
    pruned = make_pruned(sizes, device, generator)
    dense = repacked(pruned)
    q = pruned.random(sizes.lanes, sizes.q_heads, generator)
    scattered = times_ms(_slot_decode(library, pruned, q), repeats)
    packed = times_ms(_slot_decode(library, dense, q), repeats)
    del pruned, dense
    full = make_pruned(replace(sizes, keep=1.0), device, generator)
    unpruned = times_ms(_slot_decode(library, full, q), repeats)
    what = f"{sizes.lanes} lanes of {sizes.span}, 0.3 kept, decode kernel time"
    return {
        "decode_time_ratio_repacked_keep30": ratio_figure(
            packed, scattered, f"repacked / scattered slots, {what}"
        ),
        "decode_time_ratio_pruned_keep30": ratio_figure(
            scattered, unpruned, f"scattered slots / nothing evicted, {what}"
        ),
    }


def _slot_decode(library: Any, pruned: Pruned, q: torch.Tensor) -> Any:
    wrapper = _decode_wrapper(library, q.device)
    plan_decode(wrapper, pruned, *pruned.lists())
    pool, scale = (pruned.k, pruned.v), pruned.sizes.dim**-0.5
    return lambda: wrapper.forward(q, pool, sm_scale=scale)


def _decode_wrapper(library: Any, device: torch.device) -> Any:
    return library.BatchDecodeWithPagedKVCacheWrapper(
        workspace(device), "NHD", backend="fa2", use_tensor_cores=True
    )
