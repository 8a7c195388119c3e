"""Captured decode: static buffers, padded lanes, host and device lengths of one plan, commits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.layers.attention.flashinfer_backend import DecodeMetadata
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view

from tests.helpers.attention_batches import (
    ROW_WIDTH,
    Geometry,
    Lanes,
    cuda_replaced,
    make_batch,
    make_layer,
    make_runner,
    place,
    random_qkv,
)
from tests.helpers.flashinfer_parts import StandInError
from tests.kernels.attention_reference import Pool, dense_attention
from vtoken_sglang.engine.attention.flashinfer import VTokenFlashInferAttnBackend

GEOMETRY = Geometry(q_heads=4, kv_heads=2, page_size=4)
MAX_BS = 8


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with cuda_replaced():
        yield


class CapturedDecode:
    """SGLang's decode graph runner in small: one capture of `bs` lanes, replayed with padding."""

    def __init__(self, bs: int, *, tensor_cores: bool = False) -> None:
        self.bs = bs
        self.runner = make_runner(GEOMETRY)
        self.backend = VTokenFlashInferAttnBackend(self.runner)
        self.backend.decode_use_tensor_cores = tensor_cores
        self.backend.init_cuda_graph_state(MAX_BS, MAX_BS)
        self.buffers = SimpleNamespace(
            input_ids=torch.zeros(bs, dtype=torch.int64),
            positions=torch.zeros(bs, dtype=torch.int64),
            req_pool_indices=torch.zeros(bs, dtype=torch.int64),
            seq_lens=torch.ones(bs, dtype=torch.int64),
            seq_lens_cpu=torch.ones(bs, dtype=torch.int64),
            out_cache_loc=torch.zeros(bs, dtype=torch.int64),
            mamba_track_indices=None,
        )
        self._capture()

    def _capture(self) -> None:
        buffers = self.buffers
        batch = SimpleNamespace(
            batch_size=self.bs,
            forward_mode=ForwardMode.DECODE,
            positions=buffers.positions,
            req_pool_indices=buffers.req_pool_indices,
            seq_lens=buffers.seq_lens,
            seq_lens_cpu=buffers.seq_lens_cpu,
            seq_lens_sum=self.bs,
            out_cache_loc=buffers.out_cache_loc,
            encoder_lens=None,
            spec_info=None,
        )
        self.runner.kv_index_translator.bind_runner_slots(batch)
        self.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        self.wrapper = self.backend.decode_cuda_graph_metadata[self.bs][0]

    def plan(self, lanes: Lanes) -> SimpleNamespace:
        """What happens before a replay: buffers filled, padding included, metadata replanned."""
        batch = make_batch(self.runner, lanes, ForwardMode.DECODE)
        batch.positions = batch.seq_lens - 1
        real, buffers = len(lanes.own), self.buffers
        for name, fill in (("req_pool_indices", 0), ("seq_lens", 1), ("seq_lens_cpu", 1)):
            getattr(buffers, name).fill_(fill)
            getattr(buffers, name)[:real] = getattr(batch, name)
        buffers.out_cache_loc.zero_()
        buffers.out_cache_loc[:real] = batch.out_cache_loc
        view = build_replay_fb_view(
            forward_batch=batch,
            buffers=buffers,
            bs=self.bs,
            raw_bs=real,
            num_tokens=self.bs,
            global_num_tokens_cpu=None,
            seq_len_fill_value=self.backend.get_cuda_graph_seq_len_fill_value(),
            capture_forward_mode=ForwardMode.DECODE,
            is_encoder_decoder=False,
        )
        self.backend.init_forward_metadata_out_graph(view)
        return batch

    def replay(self, batch: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        """The captured layer; returns (q, output) of all lanes, padding included."""
        self.backend.forward_metadata = DecodeMetadata([self.wrapper])
        q, k, v = random_qkv(GEOMETRY, self.bs)
        self.buffers_batch = SimpleNamespace(
            out_cache_loc=self.buffers.out_cache_loc,
            out_cache_loc_is_physical=batch.out_cache_loc_is_physical,
            kv_loc_plan=batch.kv_loc_plan,
        )
        out = self.backend.forward_decode(q, k, v, make_layer(GEOMETRY), self.buffers_batch)
        shape = (-1, GEOMETRY.q_heads, GEOMETRY.dim)
        return q.view(shape), out.view(shape)

    def expected(self, lanes: Lanes, q: torch.Tensor) -> torch.Tensor:
        pool = self.runner.token_to_kv_pool
        rows = self.runner.req_to_token_pool.req_to_token
        view = Pool(k=pool.get_key_buffer(0), v=pool.get_value_buffer(0), rows=rows)
        parts = [
            dense_attention(q[lane : lane + 1], view, row, span, GEOMETRY.dim**-0.5)
            for lane, (row, span) in enumerate(zip(lanes.rows, lanes.spans, strict=True))
        ]
        return torch.cat(parts)


def check(captured: CapturedDecode, lanes: Lanes) -> torch.Tensor:
    batch = captured.plan(lanes)
    q, out = captured.replay(batch)
    real = len(lanes.own)
    wanted = captured.expected(lanes, q)
    torch.testing.assert_close(out[:real].double(), wanted, atol=1e-5, rtol=1e-5)
    sink = captured.runner.token_to_kv_pool.get_value_buffer(0)[0]
    for padded in out[real:]:
        torch.testing.assert_close(padded, sink.repeat_interleave(2, dim=0))
    return out[:real]


@pytest.mark.parametrize("tensor_cores", [False, True])
@pytest.mark.parametrize("real", [1, 5, 8])
@pytest.mark.parametrize("evicted_share", [0.0, 0.6, 1.0])
def test_replays_with_padded_lanes(tensor_cores: bool, real: int, evicted_share: float) -> None:
    captured = CapturedDecode(8, tensor_cores=tensor_cores)
    prefix = [0, 3, 70, 250, 1, 33, 64, 128][:real]
    for seed in range(3):
        lanes = Lanes(prefix=prefix, own=[1] * real)
        check(captured, place(captured.runner, lanes, evicted_share=evicted_share, seed=seed))
    assert [plan["how"] for plan in captured.wrapper.plans] == ["plan", *["fast"] * 3]
    assert isinstance(captured.wrapper.begin_forward, partial)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(0, ROW_WIDTH - 60), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.integers(0, 1000),
)
def test_host_and_device_indptr_agree(prefix: list[int], evicted_share: float, seed: int) -> None:
    """The stand-in refuses a run whose host and device indptr differ; both are the live ones."""
    captured = CapturedDecode(8)
    lanes = Lanes(prefix=prefix, own=[1] * len(prefix))
    place(captured.runner, lanes, evicted_share=evicted_share, seed=seed)
    check(captured, lanes)
    table = captured.runner.req_to_token_pool.req_to_token
    live = [
        int((table[row, :span] != 0).sum())
        for row, span in zip(lanes.rows, lanes.spans, strict=True)
    ]
    lens = [*live, *[1] * (8 - len(prefix))]
    host = captured.wrapper._lists.host_indptr
    assert host.diff().tolist() == lens


def test_a_wrong_host_length_is_seen() -> None:
    """Negative control of the two tests above."""
    captured = CapturedDecode(4)
    lanes = place(captured.runner, Lanes(prefix=[60, 70], own=[1, 1]), evicted_share=0.5)
    batch = captured.plan(lanes)
    captured.wrapper._lists.host_indptr[1] += 1
    with pytest.raises(StandInError, match="host indptr"):
        captured.replay(batch)


def test_a_commit_between_two_replays() -> None:
    """Moving live tokens to other slots and pages changes nothing the captured decode returns."""
    captured = CapturedDecode(8)
    table = captured.runner.req_to_token_pool.req_to_token
    pool = captured.runner.token_to_kv_pool
    lanes = place(captured.runner, Lanes(prefix=[100, 40, 250], own=[1, 1, 1]), evicted_share=0.7)
    before = check(captured, lanes)
    for row, span in zip(lanes.rows, lanes.spans, strict=True):
        live = [pos for pos in range(span - 1) if table[row, pos]]
        used = set(table.flatten().tolist())
        free = [slot for slot in range(1, len(pool.k_buffer[0])) if slot not in used]
        old, new = table[row, live].long(), torch.tensor(free[: len(live)])
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[new] = buffer[old]
            buffer[old] = torch.nan  # given to someone else
        table[row, live] = new.to(torch.int32)
    assert torch.equal(check(captured, lanes), before)


def test_a_commit_after_the_plan_is_not_seen_by_its_replay() -> None:
    """Index lists are copied when the forward is planned: a later commit belongs to the next."""
    captured = CapturedDecode(2)
    table = captured.runner.req_to_token_pool.req_to_token
    lanes = place(captured.runner, Lanes(prefix=[50], own=[1]), evicted_share=0.5)
    batch = captured.plan(lanes)
    kept = table[lanes.rows[0]].clone()
    table[lanes.rows[0], :20] = 4000
    q, out = captured.replay(batch)
    table[lanes.rows[0]] = kept
    torch.testing.assert_close(out[:1].double(), captured.expected(lanes, q), atol=1e-5, rtol=1e-5)
