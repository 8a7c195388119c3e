"""CPU decode and extend attention against a dense float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_reference import Pool, Shape, dense_attention, evict_random, make_pool
from vtoken_sglang.kernels.cpu.attention import AttentionPlan, decode_attention, extend_attention
from vtoken_sglang.kernels.cpu.scratch import Scratch

torch.set_num_threads(1)  # the machine may be busy, and idle OpenMP threads spin
SCALING = 0.3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = (
    Shape(q_heads=9, kv_heads=3),
    Shape(q_heads=4, kv_heads=4),
    Shape(q_heads=8, kv_heads=1),
    Shape(q_heads=12, kv_heads=1),
    Shape(q_heads=10, kv_heads=2, qk_dim=20, v_dim=20),
    Shape(q_heads=4, kv_heads=2, qk_dim=24, v_dim=16),
    Shape(q_heads=4, kv_heads=2, qk_dim=16, v_dim=24),
)


def run_extend(
    q: torch.Tensor, pool: Pool, row_ids: list[int], spans: list[int], own_lens: list[int]
) -> torch.Tensor:
    lanes = (torch.tensor(row_ids), torch.tensor(spans), torch.tensor(own_lens))
    plan = AttentionPlan(pool.rows, *lanes, Scratch())
    out = torch.full((*q.shape[:2], pool.v.shape[2]), torch.nan, dtype=q.dtype)
    extend_attention(q, pool.k, pool.v, plan, SCALING, out)
    return out


def run_decode(
    q: torch.Tensor,
    pool: Pool,
    row_ids: list[int],
    spans: list[int],
    scratch: Scratch | None = None,
) -> torch.Tensor:
    lanes = (torch.tensor(row_ids), torch.tensor(spans), None)
    plan = AttentionPlan(pool.rows, *lanes, scratch or Scratch())
    out = torch.full((*q.shape[:2], pool.v.shape[2]), torch.nan, dtype=q.dtype)
    decode_attention(q, pool.k, pool.v, plan, SCALING, out)
    return out


def random_q(num_tokens: int, shape: Shape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    gen = torch.Generator().manual_seed(7)
    return torch.randn(num_tokens, shape.q_heads, shape.qk_dim, generator=gen).to(dtype)


def check_extend(
    shape: Shape,
    spans: list[int],
    own_lens: list[int],
    *,
    page_size: int = 1,
    share: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> None:
    pool = make_pool(spans, shape, page_size=page_size, dtype=dtype)
    evict_random(pool.rows, spans, own_lens, share=share)
    q = random_q(sum(own_lens), shape, dtype)
    row_ids = list(range(1, len(spans) + 1))
    out = run_extend(q, pool, row_ids, spans, own_lens)
    start = 0
    for row, span, own in zip(row_ids, spans, own_lens, strict=True):
        expected = dense_attention(q[start : start + own], pool, row, span, SCALING)
        got = out[start : start + own].double()
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        start += own


lanes = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(
    lanes,
    st.sampled_from(SHAPES),
    st.sampled_from([1, 16]),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_extend_equals_dense(
    lanes: list[tuple[int, int]], shape: Shape, page_size: int, share: float
) -> None:
    own_lens = [own for _, own in lanes]
    spans = [prefix + own for prefix, own in lanes]
    check_extend(shape, spans, own_lens, page_size=page_size, share=share)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=9),
    st.sampled_from(SHAPES),
    st.sampled_from([1, 16]),
    st.sampled_from([0.0, 0.4, 1.0]),
)
def test_decode_equals_dense(spans: list[int], shape: Shape, page_size: int, share: float) -> None:
    pool = make_pool(spans, shape, page_size=page_size)
    evict_random(pool.rows, spans, [1] * len(spans), share=share)
    q = random_q(len(spans), shape)
    row_ids = list(range(1, len(spans) + 1))
    out = run_decode(q, pool, row_ids, spans)
    for lane, (row, span) in enumerate(zip(row_ids, spans, strict=True)):
        expected = dense_attention(q[lane : lane + 1], pool, row, span, SCALING)
        torch.testing.assert_close(out[lane : lane + 1].double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision(shape: Shape, dtype: torch.dtype) -> None:
    check_extend(shape, [1, 70, 300, 33], [1, 5, 290, 1], share=0.3, dtype=dtype)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32])
def test_pool_dtype_differs_from_query(kv_dtype: torch.dtype) -> None:
    shape = Shape(q_heads=4, kv_heads=2)
    spans, own_lens = [40, 9], [3, 1]
    pool = make_pool(spans, shape, dtype=kv_dtype)
    q_dtype = torch.float32 if kv_dtype == torch.bfloat16 else torch.bfloat16
    q = random_q(4, shape, q_dtype)
    out = run_extend(q, pool, [1, 2], spans, own_lens)
    assert out.dtype == q_dtype
    expected = torch.cat(
        [dense_attention(q[:3], pool, 1, 40, SCALING), dense_attention(q[3:], pool, 2, 9, SCALING)]
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


def test_long_lanes_cross_every_block_border() -> None:
    shape = Shape(q_heads=6, kv_heads=2)
    spans = [511, 512, 513, 1024, 1025, 2049, 3000]
    pool = make_pool(spans, shape)
    q = random_q(len(spans), shape)
    out = run_decode(q, pool, list(range(1, len(spans) + 1)), spans)
    for lane, span in enumerate(spans):
        expected = dense_attention(q[lane : lane + 1], pool, lane + 1, span, SCALING)
        torch.testing.assert_close(out[lane : lane + 1].double(), expected, atol=2e-6, rtol=2e-6)


def test_padding_lane_reads_only_the_sink() -> None:
    shape = Shape(q_heads=4, kv_heads=2)
    pool = make_pool([20], shape)
    q = random_q(2, shape)
    out = run_decode(q, pool, [1, 0], [20, 1])
    torch.testing.assert_close(out[1], pool.v[0].repeat_interleave(2, dim=0))


@pytest.mark.parametrize("shape", SHAPES)
def test_neighbours_change_no_bit(shape: Shape) -> None:
    """A lane's result depends on its own q, keys and length only: not on batch, order or slots."""
    spans = [1, 2, 17, 64, 65, 200, 200, 513, 700, 1300, 2500]
    pool = make_pool(spans, shape)
    row_ids = list(range(1, len(spans) + 1))
    q = random_q(len(spans), shape)
    together = run_decode(q, pool, row_ids, spans)
    order = torch.randperm(len(spans), generator=torch.Generator().manual_seed(3)).tolist()
    scratch = Scratch()
    shuffled = run_decode(
        q[order], pool, [row_ids[i] for i in order], [spans[i] for i in order], scratch
    )
    assert torch.equal(shuffled, together[order])
    for lane, span in enumerate(spans):
        alone = run_decode(q[lane : lane + 1], pool, [row_ids[lane]], [span], scratch)
        assert torch.equal(alone[0], together[lane]), f"lane {lane}, span {span}"


@pytest.mark.parametrize("page_size", [16, 4096])
def test_slot_placement_changes_no_bit(page_size: int) -> None:
    """Moving a request's tokens to other slots (repacking) leaves its output bits alone."""
    shape = Shape(q_heads=9, kv_heads=3, qk_dim=64, v_dim=64)
    spans = [300, 1500]
    scattered = make_pool(spans, shape, page_size=1, seed=1)
    compacted = make_pool(spans, shape, page_size=page_size, seed=2)
    for row, span in enumerate(spans, start=1):
        old, new = scattered.rows[row, :span].long(), compacted.rows[row, :span].long()
        compacted.k[new], compacted.v[new] = scattered.k[old], scattered.v[old]
    q = random_q(2, shape)
    assert torch.equal(
        run_decode(q, scattered, [1, 2], spans), run_decode(q, compacted, [1, 2], spans)
    )


def test_evicted_tokens_and_neighbour_slots_are_never_read() -> None:
    shape = Shape(q_heads=4, kv_heads=2)
    spans, own_lens = [150, 600], [1, 1]
    pool = make_pool(spans, shape)
    evict_random(pool.rows, spans, own_lens, share=0.5)
    q = random_q(2, shape)
    before = run_decode(q, pool, [1, 2], spans)
    read = set(pool.rows.flatten().tolist()) - {0}
    unread = [slot for slot in range(pool.k.shape[0]) if slot not in read]
    pool.k[unread], pool.v[unread] = torch.nan, torch.nan
    assert torch.equal(run_decode(q, pool, [1, 2], spans), before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_lane_spoils_neither_neighbours_nor_the_next_forward(bad: float) -> None:
    shape = Shape(q_heads=9, kv_heads=3)
    spans = [40, 300, 900]
    pool = make_pool(spans, shape)
    q, scratch = random_q(3, shape), Scratch()
    clean = run_decode(q, pool, [1, 2, 3], spans, scratch)
    slots = pool.rows[2, :100].long()
    keys, values = pool.k[slots].clone(), pool.v[slots].clone()
    pool.k[slots], pool.v[slots] = bad, bad
    broken = run_decode(q, pool, [1, 2, 3], spans, scratch)
    assert not broken[1].isfinite().all()
    assert torch.equal(broken[[0, 2]], clean[[0, 2]])
    pool.k[slots], pool.v[slots] = keys, values
    assert torch.equal(
        run_decode(q, pool, [3, 2, 1], spans[::-1], scratch)[0],
        run_decode(q[:1], pool, [3], [900])[0],
    )
    assert torch.equal(run_decode(q, pool, [1, 2, 3], spans, scratch), clean)


def test_layers_of_two_geometries_share_a_plan() -> None:
    """Views of one geometry's scratch outlast the cutting of another's."""
    spans = [100, 700]
    shapes = [Shape(q_heads=9, kv_heads=3), Shape(q_heads=4, kv_heads=2)]
    pools = [make_pool(spans, shape) for shape in shapes]
    assert torch.equal(pools[0].rows, pools[1].rows)
    lanes = (torch.tensor([1, 2]), torch.tensor(spans), None)
    plan = AttentionPlan(pools[0].rows, *lanes, Scratch())
    for _ in range(2):
        for shape, pool in zip(shapes, pools, strict=True):
            q = random_q(2, shape)
            out = torch.empty_like(q)
            decode_attention(q, pool.k, pool.v, plan, SCALING, out)
            assert torch.equal(out, run_decode(q, pool, [1, 2], spans))


def test_extend_of_one_token_equals_decode() -> None:
    shape = Shape(q_heads=9, kv_heads=3)
    spans = [5, 300, 1100]
    pool = make_pool(spans, shape)
    q = random_q(3, shape)
    decoded = run_decode(q, pool, [1, 2, 3], spans)
    assert torch.equal(run_extend(q, pool, [1, 2, 3], spans, [1, 1, 1]), decoded)


def test_chunked_extend_equals_whole_extend() -> None:
    shape = Shape(q_heads=9, kv_heads=3)
    pool = make_pool([400], shape)
    q = random_q(400, shape)
    whole = run_extend(q, pool, [1], [400], [400])
    for cut in (1, 128, 399):
        first = run_extend(q[:cut], pool, [1], [cut], [cut])
        second = run_extend(q[cut:], pool, [1], [400], [400 - cut])
        torch.testing.assert_close(torch.cat([first, second]), whole, atol=2e-6, rtol=2e-6)
