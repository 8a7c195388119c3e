"""FlashInfer's wrappers in plain PyTorch, so that the backend's own code runs on a CPU.

Plans and runs keep FlashInfer's contract, and what would go wrong silently on a GPU raises here:
a host indptr that differs from the device's, a captured buffer that was replaced, a plan for other
head counts or dtypes than the run's. Every parameter here exists in the installed flashinfer with
the same default and, where it may be passed by position, at the same place
(`test_attention_flashinfer_signatures.py`): calls that pass here pass there. lse is base 2.
"""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import torch

from tests.helpers.flashinfer_parts import (
    PagedLists,
    Pool,
    Wrapper,
    finish,
    merge_state,
    merge_states,
    require,
    split_queries,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "fast_decode_plan",
    "merge_state",
    "merge_states",
]


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One query token per lane."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self.use_tensor_cores = use_tensor_cores
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._lists = PagedLists(use_cuda_graph, buffers)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **kwargs: Any,
    ) -> None:
        self._plan_impl(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **kwargs,
        )

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        data_type: str | torch.dtype | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        self._take_plan(fixed_split_size, disable_split_kv, page_size, "plan")
        self.note(num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type or data_type)
        self._lists.set(indptr, indices, last_page_len, page_size, None, copies=True)

    begin_forward = plan

    def _take_plan(
        self, fixed_split_size: int | None, disable_split_kv: bool, page_size: int, how: str
    ) -> None:
        if fixed_split_size is not None and not self.use_tensor_cores:
            raise ValueError("fixed_split_size is for tensor-core decode")
        options = {"fixed_split_size": fixed_split_size, "disable_split_kv": disable_split_kv}
        self.plans.append({**options, "page_size": page_size, "how": how})

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pool,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> torch.Tensor:
        self.remember(False, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pool,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.remember(False, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pool,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        self.check_run(q, paged_kv_cache[0])
        lanes = self._lists.lanes(paged_kv_cache)
        require(len(lanes) == len(q), f"planned {len(lanes)} lanes, run with {len(q)}")
        queries = [q[lane : lane + 1] for lane in range(len(q))]
        return finish(self, queries, lanes, q, k_scale, v_scale, return_lse)

    run_return_lse = partialmethod(run, return_lse=True)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    *,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Replan a captured decode: the caller wrote the buffers, lengths come from the host."""
    require(bool(self.plans), "fast_decode_plan needs the module of an earlier plan")
    self._take_plan(fixed_split_size, disable_split_kv, page_size, "fast")
    self.note(num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type or data_type)
    host = global_override_indptr_cpu
    self._lists.set(indptr, indices, last_page_len, page_size, host, copies=False)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Several query tokens per lane over a paged pool."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._lists = PagedLists(use_cuda_graph, buffers)
        self._qo_indptr: list[int] = []

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: torch.Tensor | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
    ) -> None:
        special = (custom_mask, prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr)
        require(all(value is None for value in special), "no custom mask, no multi-item scoring")
        require(token_pos_in_items_len == 0, "no multi-item scoring")
        self.plans.append({"fixed_split_size": fixed_split_size, "page_size": page_size})
        self.note(num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type)
        self._qo_indptr = qo_indptr.tolist()
        self._lists.set(
            paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, None, copies=True
        )

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pool,
        causal: bool = False,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> torch.Tensor:
        self.remember(causal, logits_soft_cap, sm_scale, window_left)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pool,
        causal: bool = False,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.remember(causal, logits_soft_cap, sm_scale, window_left)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pool,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        self.check_run(q, paged_kv_cache[0])
        lanes = self._lists.lanes(paged_kv_cache)
        queries = split_queries(q, self._qo_indptr)
        return finish(self, queries, lanes, q, k_scale, v_scale, return_lse)

    run_return_lse = partialmethod(run, return_lse=True)


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Several query tokens per lane over their own K and V."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        self._indptrs: tuple[list[int], list[int]] = ([], [])

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        self.plans.append({"queries": qo_indptr.tolist()})
        self.note(num_qo_heads, num_kv_heads, head_dim_qk, q_data_type, kv_data_type)
        self._indptrs = (qo_indptr.tolist(), kv_indptr.tolist())

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> torch.Tensor:
        self.remember(causal, logits_soft_cap, sm_scale, window_left)
        return self.run(q, k, v)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.remember(causal, logits_soft_cap, sm_scale, window_left)
        return self.run(q, k, v, return_lse=True)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool = False
    ) -> Any:
        self.check_run(q, k)
        queries, spans = self._indptrs
        require(spans[-1] == len(k), f"planned {spans[-1]} keys, run with {len(k)}")
        lanes = list(zip(split_queries(k, spans), split_queries(v, spans), strict=True))
        own = split_queries(q, queries)
        return finish(self, own, lanes, q, None, None, return_lse)

    run_return_lse = partialmethod(run, return_lse=True)
