"""Every Triton kernel against its PyTorch reference, on fresh random data, where it matters in
float64.

Runs on a CUDA device, or on the CPU in a process whose Triton interprets (the dry run).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vtoken_sglang.kernels.attention_mass.reference import attention_mass_reference, rows_of
from vtoken_sglang.kernels.copy_slots.reference import copy_slots_reference
from vtoken_sglang.kernels.pack_live.reference import pack_live_reference

from .rows import Rows, random_rows

MASS_LIMIT = 1e-4  # float32 sums of up to a few thousand weights
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
EIGHT_BITS = (torch.float8_e5m2, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison.

    Fields:
        error: greatest absolute difference; for integer and byte results, wrong elements.
        limit: greatest error that passes.
    """

    kernel: str
    what: str
    error: float
    limit: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the kernel equals its reference (NaN does not pass)."""
        return self.error <= self.limit


def check_kernels(device: torch.device, seed: int, *, small: bool) -> list[Case]:
    """Compare all kernels. `small`: sizes for the interpreter."""
    generator = torch.Generator(device).manual_seed(seed)
    cases: list[Case] = []
    for check in (check_copy_slots, check_pack_live, check_attention_mass):
        cases += check(device, generator, small)
    return cases


def _wrong(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got != wanted).sum())


def check_copy_slots(device: torch.device, generator: torch.Generator, small: bool) -> list[Case]:
    """Bytes of K and V of several layers, per dtype and row size."""
    from vtoken_sglang.kernels.copy_slots.triton import copy_slots_triton

    slots, moved, layers = (200, 37, 2) if small else (20_000, 3_001, 8)
    cases = []
    for dtype in (*FLOATS, *EIGHT_BITS):
        for heads, key_dim, value_dim in ((8, 128, 128), (3, 64, 64), (2, 24, 16)):
            size = torch.empty(0, dtype=dtype).element_size()
            buffers = [
                torch.randint(
                    0,
                    256,
                    (slots, heads, dim * size),
                    dtype=torch.uint8,
                    device=device,
                    generator=generator,
                ).view(dtype)
                for dim in (key_dim, value_dim)
                for _ in range(layers)
            ]
            wanted = [buffer.view(torch.uint8).clone() for buffer in buffers]
            order = torch.randperm(slots, device=device, generator=generator)
            src, dst = order[:moved].clone(), order[moved : 2 * moved].clone()
            copy_slots_reference(wanted, src, dst)
            copy_slots_triton(buffers, src, dst)
            error = sum(
                _wrong(buffer.view(torch.uint8), expected)
                for buffer, expected in zip(buffers, wanted, strict=True)
            )
            what = f"{dtype} {heads}x{key_dim}/{value_dim}"
            cases.append(Case(kernel="copy_slots", what=what, error=error))
    return cases


def check_pack_live(device: torch.device, generator: torch.Generator, small: bool) -> list[Case]:
    """Slots, positions and lengths, short rows and long ones, padding, prefixes."""
    from vtoken_sglang.kernels.pack_live.triton import pack_live_triton

    longest = 3_000 if small else 100_000
    cases = []
    for lanes, span, keep in ((5, 700, 0.3), (8, longest, 0.3), (3, longest, 1.0)):
        rows = random_rows(lanes, span, keep, device, generator, padding=3)
        for dtype in (torch.int32, torch.int64):
            total = int(rows.indptr[-1])
            got, wanted = (
                (
                    torch.full((total + 3,), -7, dtype=dtype, device=device),
                    torch.full((total + 3,), -7, dtype=torch.int32, device=device),
                    torch.zeros(lanes + 3, dtype=torch.int32, device=device),
                )
                for _ in range(2)
            )
            for pack, out in ((pack_live_triton, got), (pack_live_reference, wanted)):
                pack(rows.table, rows.row_ids, rows.spans, rows.indptr, *out, max_span=span)
            error = sum(_wrong(mine, other) for mine, other in zip(got, wanted, strict=True))
            what = f"{lanes} lanes of {span}, keep {keep}, {dtype}"
            cases.append(Case(kernel="pack_live", what=what, error=error))
    return cases


def check_attention_mass(
    device: torch.device, generator: torch.Generator, small: bool
) -> list[Case]:
    """Scores against a float64 reference, per key dtype and head layout; decode and several
    queries."""
    from vtoken_sglang.kernels.attention_mass.triton import attention_mass_triton

    longest = 200 if small else 6_000
    cases = []
    for k_dtype in (*FLOATS, *_eight_bits_of(device)):
        q_dtype = torch.bfloat16 if k_dtype in EIGHT_BITS else k_dtype
        for heads, queries in (((32, 8, 128), 1), ((9, 3, 64), 1), ((8, 8, 96), 5)):
            rows = random_rows(3, longest, 0.3, device, generator, padding=1)
            case = _mass_case(rows, heads, queries, q_dtype, k_dtype, generator)
            error = _mass_error(attention_mass_triton, case)
            what = f"q {q_dtype} k {k_dtype} heads {heads} queries {queries}"
            cases.append(Case(kernel="attention_mass", what=what, error=error, limit=MASS_LIMIT))
    return cases


def _eight_bits_of(device: torch.device) -> tuple[torch.dtype, ...]:
    """fp8 formats that Triton can convert on this device; e4m3 needs compute capability 8.9."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9):
        return EIGHT_BITS
    return EIGHT_BITS[:1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mass:
    """Arguments of `attention_mass`, as there."""

    rows: Rows
    q: torch.Tensor
    k_buffer: torch.Tensor
    qo_indptr: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    scale: float


def _mass_case(
    rows: Rows,
    heads: tuple[int, int, int],
    queries: int,
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    generator: torch.Generator,
) -> _Mass:
    q_heads, kv_heads, dim = heads
    device, lanes, total = rows.table.device, len(rows.spans), int(rows.indptr[-1])
    counts = torch.where(rows.row_ids == 0, 1, queries)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    shape = (int(ends[-1]), q_heads, dim)
    q = torch.randn(shape, device=device, generator=generator).to(q_dtype)
    k_shape = (rows.num_slots, kv_heads, dim)
    k_buffer = torch.randn(k_shape, device=device, generator=generator).to(k_dtype)
    slots, positions = (torch.zeros(total, dtype=torch.int32, device=device) for _ in range(2))
    span = int(rows.spans.max())
    pack_live_reference(
        rows.table, rows.row_ids, rows.spans, rows.indptr, slots, positions, max_span=span
    )
    assert lanes == len(counts)
    return _Mass(
        rows=rows,
        q=q,
        k_buffer=k_buffer,
        qo_indptr=ends,
        slots=slots,
        positions=positions,
        scale=dim**-0.5,
    )


def _mass_error(form: Callable[..., None], case: _Mass) -> float:
    """Greatest difference of the scores from the reference's in float64, given the same lse."""
    rows = case.rows
    lse = _float64_lse(case)
    scores = []
    for run, dtype in ((form, torch.float32), (attention_mass_reference, torch.float64)):
        table = torch.zeros(rows.table.shape, dtype=dtype, device=case.q.device)
        run(
            case.q,
            case.k_buffer,
            case.qo_indptr,
            rows.indptr,
            case.slots,
            case.positions,
            rows.row_ids,
            lse.to(torch.float32),
            table,
            scale=case.scale,
        )
        scores.append(table.double())
    return float((scores[0] - scores[1]).abs().max())


def _float64_lse(case: _Mass) -> torch.Tensor:
    group = case.q.shape[1] // case.k_buffer.shape[1]
    lse = torch.zeros(case.q.shape[:2], dtype=torch.float64, device=case.q.device)
    bounds, queries = case.rows.indptr.tolist(), case.qo_indptr.tolist()
    for lane in range(len(bounds) - 1):
        keys = rows_of(case.k_buffer, case.slots[bounds[lane] : bounds[lane + 1]].long()).double()
        keys = keys.repeat_interleave(group, dim=1)
        for token in range(queries[lane], queries[lane + 1]):
            sees = len(keys) - (queries[lane + 1] - token - 1)
            logits = torch.einsum("hd,khd->hk", case.q[token].double(), keys[:sees]) * case.scale
            lse[token] = logits.logsumexp(dim=1)
    return lse
