"""A model runner, rows with holes, and forwards, for the attention backends on a CPU.

Pool, translator, plan, layer and batch modes are SGLang's own; what a GPU would be needed for is
replaced in `cuda_replaced`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import kv_index_translator
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig

from tests.helpers import flashinfer_stand_in as stand_in
from vtoken_sglang.engine.attention.live_lengths import measure

LAYERS = 2
ROW_WIDTH = 512
NUM_ROWS = 24


class CudaOnCpu(TorchFunctionMode):
    """Tensors that SGLang asks for on "cuda" are made on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class StockIndexKernel:
    """SGLang's gather of whole rows, `create_flashinfer_kv_indices_triton`, in PyTorch.

    Fields:
        calls: launches so far in this process.
    """

    calls = 0

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(
        self,
        rows: torch.Tensor,
        row_ids: torch.Tensor,
        lens: torch.Tensor,
        indptr: torch.Tensor,
        start: None,
        out: torch.Tensor,
        stride: int,
        **options: Any,
    ) -> None:
        assert start is None
        StockIndexKernel.calls += 1
        for lane, length in enumerate(lens.tolist()):
            begin = int(indptr[lane])
            out[begin : begin + length] = rows[int(row_ids[lane]), :length]


@contextlib.contextmanager
def cuda_replaced(**server_args: Any) -> Iterator[None]:
    """FlashInfer's wrappers, SGLang's index kernel and "cuda" tensors replaced, and SGLang's
    process-wide configuration published with `server_args`."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name in stand_in.__all__:
            patch.setattr(flashinfer_backend, name, getattr(stand_in, name), raising=False)
        patch.setattr(flashinfer_backend, "_safe_merge_state", stand_in.merge_state, raising=False)
        patch.setattr(
            kv_index_translator, "create_flashinfer_kv_indices_triton", StockIndexKernel()
        )
        stack.enter_context(get_context().override_server_args(**server_args))
        stack.enter_context(
            get_parallel().override(
                attn_tp_size=1, attn_tp_rank=0, attn_dcp_size=1, attn_dcp_rank=0
            )
        )
        stack.enter_context(CudaOnCpu())
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes of one test model."""

    q_heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 1
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32


def make_runner(geometry: Geometry, *, slots: int = 4096) -> SimpleNamespace:
    """A model runner with what the attention backends read of one. K and V are random."""
    pool = MHATokenToKVPool(
        size=slots,
        page_size=geometry.page_size,
        dtype=geometry.kv_dtype,
        head_num=geometry.kv_heads,
        head_dim=geometry.dim,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    generator = torch.Generator().manual_seed(1)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        values = torch.randn(buffer.shape, generator=generator).to(geometry.kv_dtype)
        buffer.copy_(values.view(buffer.dtype))
    rows = torch.zeros(NUM_ROWS, ROW_WIDTH, dtype=torch.int32)
    allocator = SimpleNamespace(get_kvcache=lambda: pool, page_size=geometry.page_size)
    model_config = SimpleNamespace(
        num_attention_heads=geometry.q_heads,
        get_max_num_attention_heads=lambda: geometry.q_heads,
        get_num_kv_heads=lambda *sizes: geometry.kv_heads,
        context_len=ROW_WIDTH - 4,
        head_dim=geometry.dim,
        v_head_dim=geometry.dim,
        swa_v_head_dim=geometry.dim,
        is_multimodal=False,
        is_encoder_decoder=False,
        attention_arch=None,
        linear_attn_registry_result=None,
        hf_config=LlamaConfig(architectures=["LlamaForCausalLM"]),
    )
    return SimpleNamespace(
        device="cpu",
        gpu_id=0,
        dtype=geometry.dtype,
        kv_cache_dtype=geometry.kv_dtype,
        page_size=geometry.page_size,
        sliding_window_size=None,
        is_draft_worker=False,
        use_mla_backend=False,
        init_new_workspace=False,
        prefill_attention_backend_str="flashinfer",
        decode_attention_backend_str="flashinfer",
        server_args=get_context().server_args,
        model_config=model_config,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=SimpleNamespace(size=NUM_ROWS - 1, req_to_token=rows),
        decode_num_tokens_per_req=lambda: 1,
        kv_index_translator=KVIndexTranslator(
            req_to_token=rows,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=pool,
            page_size=geometry.page_size,
            device="cpu",
        ),
    )


def make_layer(geometry: Geometry, layer_id: int = 0) -> RadixAttention:
    """An attention layer of the model."""
    scaling = geometry.dim**-0.5
    return RadixAttention(geometry.q_heads, geometry.dim, scaling, geometry.kv_heads, layer_id)


@dataclass(slots=True, kw_only=True)
class Lanes:
    """Requests of a forward: each has `prefix` tokens before it and computes `own`.

    Fields:
        rows: row of each lane in the runner's table.
        dead: evicted tokens of each row, as the host counts them.
    """

    prefix: list[int]
    own: list[int]
    rows: list[int] = field(default_factory=list)
    dead: dict[int, int] = field(default_factory=dict)

    @property
    def spans(self) -> list[int]:
        """Logical lengths."""
        return [prefix + own for prefix, own in zip(self.prefix, self.own, strict=True)]


def place(runner: SimpleNamespace, lanes: Lanes, *, evicted_share: float, seed: int = 0) -> Lanes:
    """Give every lane a row of scattered pages and eviction a share of its prefix tokens.

    Where some die, at least one prefix token stays alive, as behind an open tail page.
    """
    generator = torch.Generator().manual_seed(seed)
    table, size = runner.req_to_token_pool.req_to_token, runner.page_size
    table.zero_()
    num_pages = len(runner.token_to_kv_pool.k_buffer[0]) // size
    pages = torch.randperm(num_pages - 1, generator=generator) + 1
    lanes.rows = (torch.randperm(NUM_ROWS - 1, generator=generator) + 1)[: len(lanes.own)].tolist()
    taken = 0
    for row, prefix, span in zip(lanes.rows, lanes.prefix, lanes.spans, strict=True):
        count = -(-span // size)
        slots = (pages[taken : taken + count, None] * size + torch.arange(size)).flatten()[:span]
        taken += count
        dead = torch.rand(max(prefix - 1, 0), generator=generator) < evicted_share
        slots[: len(dead)][dead] = 0
        table[row, :span] = slots.to(torch.int32)
        lanes.dead[row] = int(dead.sum())
    return lanes


def make_batch(
    runner: SimpleNamespace, lanes: Lanes, mode: ForwardMode, *, host_lens: bool = True
) -> SimpleNamespace:
    """The forward as `ForwardBatch.init_new` leaves it: plan bound, live lengths measured."""
    table = runner.req_to_token_pool.req_to_token
    spans = torch.tensor(lanes.spans)
    extend = mode != ForwardMode.DECODE
    written = [
        table[row, prefix : prefix + own].long()
        for row, prefix, own in zip(lanes.rows, lanes.prefix, lanes.own, strict=True)
    ]
    batch = SimpleNamespace(
        forward_mode=mode,
        batch_size=len(lanes.own),
        req_pool_indices=torch.tensor(lanes.rows),
        seq_lens=spans,
        seq_lens_cpu=spans.clone() if host_lens else None,
        seq_lens_sum=int(spans.sum()) if host_lens else None,
        extend_prefix_lens=None,
        extend_seq_lens=None,
        extend_prefix_lens_cpu=None,
        extend_seq_lens_cpu=None,
        extend_start_loc=None,
        out_cache_loc=torch.cat(written),
        out_cache_loc_virtual=None,
        encoder_lens=None,
        spec_info=None,
        cross_attention_custom_mask=None,
        multi_item_delimiter_indices=None,
        max_seq_len_host=None,
        max_seq_len_override=None,
        lora_ids=None,
        can_run_decode_cuda_graph=True,
        mha_one_shot=False,
        attn_attend_prefix_cache=None,
        positions=None,
    )
    if extend:
        batch.extend_prefix_lens = torch.tensor(lanes.prefix, dtype=torch.int32)
        batch.extend_seq_lens = torch.tensor(lanes.own, dtype=torch.int32)
        batch.extend_prefix_lens_cpu = list(lanes.prefix)
        batch.extend_seq_lens_cpu = list(lanes.own)
        starts = torch.tensor([0, *lanes.own[:-1]], dtype=torch.int32)
        batch.extend_start_loc = starts.cumsum(0).to(torch.int32)
    translator = runner.kv_index_translator
    plan = translator.own_plan(batch)
    plan.bind(batch, translator)
    requests = [SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row)) for row in lanes.rows]
    scheduled = SimpleNamespace(reqs=requests, prefix_lens=list(lanes.prefix) if extend else None)
    plan.kv_lens = measure(scheduled, batch, lambda row: lanes.dead[row])
    return batch


def random_qkv(
    geometry: Geometry, tokens: int, seed: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [tokens, q_heads * dim], k and v [tokens, kv_heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (tokens, geometry.q_heads * geometry.dim),
        (tokens, geometry.kv_heads, geometry.dim),
        (tokens, geometry.kv_heads, geometry.dim),
    ]
    q, k, v = (torch.randn(shape, generator=generator).to(geometry.dtype) for shape in shapes)
    return q, k, v
