"""SGLang's `flashinfer` backend, reading live tokens only.

What stays stock: both decode kernels (tensor-core and not), decode in a CUDA graph, extend as
ragged own tokens plus paged prefix merged by their log-sum-exp, paged-only extend, mixed chunks.
(Deterministic mode and fp8 pools work in this class, too; the product refuses them.) Live lengths
reach the device indptr and the host indptr of the same plan, because both are computed from the one
view of the batch (`live_reads.live_view`).

A prefill captured whole in a CUDA graph is refused: its lengths are planned for padded lanes that
the plan's live lengths do not describe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

from vtoken_sglang.engine.attention.live_reads import (
    LiveMetadata,
    install_live_reads,
    refuse_model,
)
from vtoken_sglang.engine.observe.backend_mixin import AttentionTap, flashinfer_lse
from vtoken_sglang.errors import UnsupportedModeError

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

BACKEND_NAME = "flashinfer"


class VTokenFlashInferAttnBackend(AttentionTap, LiveMetadata, FlashInferAttnBackend):
    """FlashInfer over live slots."""

    def __init__(self, model_runner: ModelRunner, **options: Any) -> None:
        super().__init__(model_runner, **options)
        refuse_model(
            {
                "sliding-window or cross attention": self.num_wrappers != 1,
                "multi-item scoring": self.enable_mis,
                "a diffusion model": self.is_dllm_model,
                "a KV cache that is dequantised before attention": (
                    self.prefill_uses_dequant_workspace or self.decode_uses_dequant_workspace
                ),
            }
        )
        # The stock constructor makes these two checks for its own class only.
        self._check_kv_attention_access("prefill", self.prefill_kv_access)
        self._check_kv_attention_access("decode", self.decode_kv_access)
        install_live_reads(self.kv_index_translator, torch.int32)
        self.make_decode_tap(model_runner)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan a decode that is captured or replayed; refuse a prefill."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise UnsupportedModeError(
                "--cuda-graph-backend-prefill full",
                "a prefill graph is planned for padded lanes without live lengths",
                "leave --cuda-graph-backend-prefill at its default, or pass disabled",
            )
        super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def _decode_with_lse(
        self, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return flashinfer_lse(self, lambda: self._stock_decode(*arguments, **options))


def register() -> None:
    """Make SGLang build our backend under the stock name "flashinfer" in this process."""

    def create(model_runner: ModelRunner) -> VTokenFlashInferAttnBackend:
        refuse_model({"latent attention (MLA)": bool(model_runner.use_mla_backend)})
        return VTokenFlashInferAttnBackend(
            model_runner, init_new_workspace=model_runner.init_new_workspace
        )

    register_attention_backend(BACKEND_NAME)(create)
