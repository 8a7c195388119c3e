"""Choose and register the attention backends that read live slots only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtoken_sglang.errors import HookError
from vtoken_sglang.kernels.cpu.attention import ReadMode
from vtoken_sglang.options import VTokenConfig

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def install_backends(config: VTokenConfig) -> None:
    """Re-register the stock backend names with our subclasses, in this process.

    `torch_native` is ours in every arm: `native` reads rows directly, every other arm reads live
    slots only. On CUDA the stock backends are fair, so `native` leaves them alone.
    """
    import torch

    from vtoken_sglang.engine.attention import cpu as attention_cpu

    attention_cpu.register(read_mode(config))
    if config.arm == "native" or not torch.cuda.is_available():
        return
    from vtoken_sglang.engine.attention import flashinfer as attention_flashinfer
    from vtoken_sglang.engine.attention import triton as attention_triton

    attention_flashinfer.register()
    attention_triton.register()


def read_mode(config: VTokenConfig) -> ReadMode:
    """How `torch_native` reads rows in this arm: every arm but `native` goes through the live list,
    whether or not anything was evicted."""
    return "direct" if config.arm == "native" else "live"


def verify_backend(model_runner: ModelRunner, config: VTokenConfig) -> None:
    """Raise HookError unless the runner's attention backend reads as this arm says."""
    from vtoken_sglang.engine.attention.cpu import VTokenTorchAttnBackend

    backend = model_runner.attn_backend
    if isinstance(backend, VTokenTorchAttnBackend):
        wanted = read_mode(config)
        if backend.mode != wanted:
            raise HookError(
                "attention-backend",
                f"rows are read in mode {backend.mode!r}, arm {config.arm!r} needs {wanted!r}",
                "check that every process uses the same environment",
            )
        return
    if model_runner.device == "cuda":
        from vtoken_sglang.engine.attention.flashinfer import VTokenFlashInferAttnBackend
        from vtoken_sglang.engine.attention.live_reads import has_live_reads
        from vtoken_sglang.engine.attention.triton import VTokenTritonAttnBackend

        if config.arm == "native":
            return
        if isinstance(backend, (VTokenFlashInferAttnBackend, VTokenTritonAttnBackend)):
            if not has_live_reads(model_runner.kv_index_translator):
                raise HookError(
                    "attention-backend",
                    f"index lists of {type(backend).__name__} are not packed from live slots",
                )
            return
    raise HookError(
        "attention-backend",
        f"{type(backend).__name__} does not read live slots",
        "serve with --attention-backend torch_native, or flashinfer or triton on CUDA",
    )
