"""Choose and register the attention backends that read through the slot map."""

from __future__ import annotations

from typing import Any

from vtoken_sglang.config import VTokenConfig
from vtoken_sglang.errors import SeamError


def install_backends(config: VTokenConfig) -> None:
    """Re-register the stock backend names with our subclasses, in this process.

    Arm `native` reads rows directly (slot map off); every other arm reads live slots only.
    """
    from vtoken_sglang.engine import attention_cpu

    attention_cpu.register("direct" if config.arm == "native" else "live")


def verify_backend(model_runner: Any) -> None:
    """Raise SeamError unless the runner's attention backend is one of ours."""
    from vtoken_sglang.engine.attention_cpu import VTokenTorchAttnBackend

    backend = model_runner.attn_backend
    if not isinstance(backend, VTokenTorchAttnBackend):
        raise SeamError(
            "attention-backend",
            f"{type(backend).__name__} does not read through the slot map",
            "serve with --attention-backend torch_native",
        )
