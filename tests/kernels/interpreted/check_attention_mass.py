"""`attention_mass` in Triton against its reference in float64, and the reference against a
softmax."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from tests.kernels.interpreted.random_rows import Batch, make_batch
from vtoken_sglang.kernels.attention_mass.reference import attention_mass_reference
from vtoken_sglang.kernels.attention_mass.triton import attention_mass_triton
from vtoken_sglang.kernels.pack_live.reference import pack_live_reference

SCALE = 0.25
HEADS = [(4, 4, 64), (8, 2, 128), (9, 3, 64), (8, 1, 80), (2, 1, 24)]
K_DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of `attention_mass`; `lse` is the true one of this attention."""

    batch: Batch
    q: torch.Tensor
    k_buffer: torch.Tensor
    qo_indptr: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    lse: torch.Tensor

    def run(self, kernel, scores: torch.Tensor) -> torch.Tensor:
        kernel(
            self.q,
            self.k_buffer,
            self.qo_indptr,
            self.batch.indptr,
            self.slots,
            self.positions,
            self.batch.row_ids,
            self.lse,
            scores,
            scale=SCALE,
        )
        return scores

    def expected(self) -> torch.Tensor:
        wide = replace(self, q=self.q.double(), k_buffer=self.k_buffer.double())
        return wide.run(attention_mass_reference, torch.zeros(self.batch.rows.shape).double())


def make_case(
    spans: list[int],
    heads: tuple[int, int, int],
    *,
    queries: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    k_dtype: torch.dtype | None = None,
    padding: int = 0,
) -> Case:
    q_heads, kv_heads, dim = heads
    batch = make_batch(spans, evicted_share=0.4, padding=padding, seed=11)
    counts = [*(queries or [1] * len(spans)), *[1] * padding]
    generator = torch.Generator().manual_seed(5)
    k_buffer = torch.randn(batch.num_slots, kv_heads, dim, generator=generator)
    q = torch.randn(sum(counts), q_heads, dim, generator=generator).to(dtype)
    total = int(batch.indptr[-1])
    slots = torch.zeros(total + 9, dtype=torch.int32)
    positions = torch.zeros(total + 9, dtype=torch.int32)
    pack_live_reference(
        batch.rows,
        batch.row_ids,
        batch.spans,
        batch.indptr,
        slots,
        positions,
        max_span=max([1, *spans]),
    )
    ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    case = Case(
        batch=batch,
        q=q,
        k_buffer=k_buffer.to(k_dtype or dtype),
        qo_indptr=ends,
        slots=slots,
        positions=positions,
        lse=torch.zeros(sum(counts), q_heads),
    )
    return replace(case, lse=true_lse(case))


def true_lse(case: Case) -> torch.Tensor:
    lse = torch.zeros(case.lse.shape)
    group = case.q.shape[1] // case.k_buffer.shape[1]
    for lane in range(len(case.batch.spans)):
        begin, end = case.batch.indptr[lane : lane + 2].tolist()
        first, last = case.qo_indptr[lane : lane + 2].tolist()
        keys = case.k_buffer[case.slots[begin:end].long()].double().repeat_interleave(group, dim=1)
        for query in range(first, last):
            sees = end - begin - (last - query - 1)
            logits = torch.einsum("hd,khd->hk", case.q[query].double(), keys[:sees]) * SCALE
            lse[query] = logits.logsumexp(dim=1)
    return lse


@pytest.mark.parametrize("k_dtype", K_DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode(heads: tuple[int, int, int], k_dtype: torch.dtype) -> None:
    dtype = torch.float32 if k_dtype == torch.float32 else torch.bfloat16
    case = make_case([1, 40, 300, 77], heads, dtype=dtype, k_dtype=k_dtype, padding=2)
    got = case.run(attention_mass_triton, torch.zeros(case.batch.rows.shape))
    torch.testing.assert_close(got.double(), case.expected(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_each_live_token_and_only_those(heads: tuple[int, int, int]) -> None:
    """Weights of one query token and head sum to 1; evicted tokens and padding get nothing."""
    case = make_case([50, 90], heads, padding=3)
    got = case.run(attention_mass_triton, torch.zeros(case.batch.rows.shape))
    for lane, row in enumerate(case.batch.row_ids[:2].tolist()):
        assert float(got[row].sum()) == pytest.approx(heads[0], rel=1e-5)
        live = torch.zeros(got.shape[1], dtype=torch.bool)
        span = int(case.batch.spans[lane])
        live[:span] = case.batch.rows[row, :span] != 0
        assert bool((got[row][live] > 0).all())
        assert not bool(got[row][~live].any())
    assert not bool(got[0].any())


def test_several_query_tokens_are_causal() -> None:
    case = make_case([60, 200, 9], (4, 2, 32), queries=[5, 16, 1], padding=1)
    got = case.run(attention_mass_triton, torch.zeros(case.batch.rows.shape))
    torch.testing.assert_close(got.double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_scores_accumulate() -> None:
    case = make_case([70], (4, 2, 32))
    scores = torch.rand(case.batch.rows.shape, generator=torch.Generator().manual_seed(1))
    before = scores.clone()
    case.run(attention_mass_triton, scores)
    case.run(attention_mass_triton, scores)
    wanted = before.double() + 2 * case.expected()
    torch.testing.assert_close(scores.double(), wanted, atol=1e-5, rtol=1e-5)


def test_the_reference_is_a_softmax() -> None:
    case = make_case([30], (2, 1, 16))
    row, span = int(case.batch.row_ids[0]), 30
    slots = case.batch.rows[row, :span].long()
    logits = torch.einsum("hd,kd->hk", case.q[0].double(), case.k_buffer[slots, 0].double()) * SCALE
    wanted = logits.masked_fill(slots == 0, -torch.inf).softmax(dim=1).sum(dim=0)
    torch.testing.assert_close(case.expected()[row, :span], wanted, atol=1e-6, rtol=1e-6)


def test_lists_longer_than_one_round_of_splits() -> None:
    case = make_case([9000], (2, 1, 128))
    got = case.run(attention_mass_triton, torch.zeros(case.batch.rows.shape))
    torch.testing.assert_close(got.double(), case.expected(), atol=1e-5, rtol=1e-5)


def test_lanes_that_count_small_weights() -> None:
    case = make_case([40, 300, 70], (8, 2, 64), queries=[1, 3, 1], padding=1)
    below_uniform = torch.tensor([1, 1, 0, 1], dtype=torch.int32)
    counted = partial(attention_mass_triton, below_uniform=below_uniform)
    got = case.run(counted, torch.zeros(case.batch.rows.shape))
    reference = case.run(
        partial(attention_mass_reference, below_uniform=below_uniform),
        torch.zeros(case.batch.rows.shape),
    )
    torch.testing.assert_close(got, reference, atol=1e-5, rtol=1e-5)
    first, second, third = case.batch.row_ids[:3].tolist()
    assert got[first].frac().abs().max() == 0
    assert 0 < float(got[first].sum()) < 8 * 40
    assert 0 < float(got[second].sum()) < 3 * 8 * 300
    assert float(got[third].sum()) == pytest.approx(8, rel=1e-5)
