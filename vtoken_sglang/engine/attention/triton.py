"""SGLang's `triton` backend, reading live tokens only.

Decode (eager and in a CUDA graph, split sizes from live lengths) and extend, two-stage and unified
(deterministic), are the stock kernels over the lists and lengths of `live_reads`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from vtoken_sglang.engine.attention.live_reads import LiveMetadata, install_live_reads, refuse_model
from vtoken_sglang.engine.observe.backend_mixin import AttentionTap, triton_lse

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

BACKEND_NAME = "triton"


class VTokenTritonAttnBackend(AttentionTap, LiveMetadata, TritonAttnBackend):
    """Triton attention over live slots."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        window = self.sliding_window_size
        refuse_model(
            {
                "sliding-window attention": window is not None and window > 0,
                "latent attention (MLA)": self.use_mla,
                "decode context parallelism": self.dcp_size > 1,
                "a diffusion model": self.dllm_block_size is not None,
            }
        )
        install_live_reads(self.kv_index_translator, torch.int64)
        self.make_decode_tap(model_runner)
        if self.tap is not None:
            # Its partial results lie elsewhere, and the log-sum-exp is read from the splits'.
            self.enable_lean_attention = False

    def _decode_with_lse(
        self, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = arguments[0].shape[0]
        return triton_lse(self, count, lambda: self._stock_decode(*arguments, **options))


def register() -> None:
    """Make SGLang build our backend under the stock name "triton" in this process."""
    register_attention_backend(BACKEND_NAME)(VTokenTritonAttnBackend)
