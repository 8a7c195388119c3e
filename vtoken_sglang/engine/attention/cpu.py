"""SGLang's `torch_native` attention backend, replaced by one that reads live slots.

Stock torch_native loops over requests in Python, reads rows per layer, repeats K/V for grouped
heads, and recomputes all L x L scores for every extend. This one reads the rows once per forward
and computes only the new rows. Semantics, writes to the pool and the registered name are stock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from vtoken_sglang.engine.observe.forward_link import LayerObserver, layer_observer
from vtoken_sglang.errors import UnsupportedModeError
from vtoken_sglang.kernels.cpu.attention import (
    AttentionPlan,
    ReadMode,
    decode_attention,
    extend_attention,
)
from vtoken_sglang.kernels.cpu.scratch import Scratch

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

BACKEND_NAME = "torch_native"
KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class VTokenTorchAttnBackend(TorchNativeAttnBackend):
    """CPU attention over the live slots of the running forward's lanes.

    Invariants:
        `_plan` belongs to the forward whose metadata was initialised last; every layer of that
        forward reads the same plan, whatever happens to the rows meanwhile.
    """

    def __init__(self, model_runner: ModelRunner, mode: ReadMode) -> None:
        super().__init__(model_runner)
        if self.use_sliding_window_kv_pool:
            raise UnsupportedModeError(
                "sliding-window model",
                "its window layers read a second pool that the lists of live slots do not cover",
                "serve it without vtoken",
            )
        if self.token_to_kv_pool.dtype not in KV_DTYPES:
            raise UnsupportedModeError(
                f"--kv-cache-dtype (KV in {self.token_to_kv_pool.dtype})",
                "the CPU kernels read float32, bfloat16 and float16",
                "leave --kv-cache-dtype at auto",
            )
        self.mode: ReadMode = mode
        self._scratch = Scratch()
        self._plan: AttentionPlan | None = None
        self._observe: LayerObserver | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Read the batch's rows into the plan that all layers of this forward share."""
        super().init_forward_metadata(forward_batch)
        self._plan = None
        self._observe = layer_observer(forward_batch)
        if forward_batch.forward_mode.is_idle() or forward_batch.encoder_lens is not None:
            return
        own_lens = None
        if not forward_batch.forward_mode.is_decode():
            own_lens = forward_batch.extend_seq_lens
        self._plan = AttentionPlan(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            own_lens,
            self._scratch,
            mode=self.mode,
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write this forward's K/V, then attend from its own tokens only."""
        plan = self._require_plan(layer)
        out = self._store_and_allocate(q, k, v, layer, forward_batch, save_kv_cache)
        q, keys, values = self._operands(q, layer)
        extend_attention(q, keys, values, plan, layer.scaling, out)
        if self._observe is not None:
            self._observe.show(layer.layer_id, q, layer.scaling)
        return out.view(out.shape[0], -1)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the new token's K/V, then attend from it."""
        plan = self._require_plan(layer)
        out = self._store_and_allocate(q, k, v, layer, forward_batch, save_kv_cache)
        seen = None
        if self._observe is not None:
            seen = self._observe.weights_seen(layer.layer_id, layer.tp_q_head_num)
        decode_attention(*self._operands(q, layer), plan, layer.scaling, out, seen)
        return out.view(out.shape[0], -1)

    def _require_plan(self, layer: RadixAttention) -> AttentionPlan:
        """Return the forward's plan, or refuse a layer that it does not describe."""
        for flag, present in (
            ("cross attention", layer.is_cross_attention),
            ("non-causal attention", layer.attn_type != AttentionType.DECODER),
            ("sliding-window attention", layer.sliding_window_size > -1),
            ("logit soft capping", layer.logit_cap > 0),
        ):
            if present:
                raise UnsupportedModeError(
                    flag, f"layer {layer.layer_id} uses it", "serve this model without vtoken"
                )
        assert self._plan is not None, "init_forward_metadata did not run for this forward"
        return self._plan

    def _store_and_allocate(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None and v is not None:
            write = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, write, k, v)
        num_tokens = q.numel() // (layer.tp_q_head_num * layer.qk_head_dim)
        return q.new_empty(num_tokens, layer.tp_q_head_num, layer.v_head_dim)

    def _operands(
        self, q: torch.Tensor, layer: RadixAttention
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
        )


def register(mode: ReadMode) -> None:
    """Make SGLang build our backend under the stock name "torch_native" in this process.

    Args:
        mode: "direct" reads rows as they are (arm `native`); "live" drops evicted entries.
    """

    def create(model_runner: ModelRunner) -> VTokenTorchAttnBackend:
        return VTokenTorchAttnBackend(model_runner, mode)

    register_attention_backend(BACKEND_NAME)(create)
