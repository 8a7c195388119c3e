"""A pure-PyTorch CPU platform for SGLang, for machines without an accelerator.

SGLang's own CPU engine (SGLANG_USE_CPU_ENGINE=1) needs CPU builds of sgl_kernel that no package
ships; this platform needs nothing but torch. `activate` is called by SGLang at import time in
every process, so it must be cheap and must never claim a machine that has an accelerator.
"""

from __future__ import annotations

import os

PLATFORM_CLASS = "vtoken_sglang.engine.plugin.cpu_platform_class.TorchCpuPlatform"


def _has_accelerator() -> bool:
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        return True
    mps = getattr(torch, "mps", None)
    if mps is not None and mps.is_available():
        return True
    for name in ("npu", "musa", "hpu"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return True
    return getattr(torch.version, "musa", None) is not None


def activate() -> str | None:
    """Return the platform class path, or None to leave the choice to SGLang.

    None when an accelerator is present or the user chose a platform by environment
    (`SGLANG_PLATFORM` naming ours counts as choosing us).
    """
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected == "vtoken_cpu":
        return None if _has_accelerator() else PLATFORM_CLASS
    if selected or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return None if _has_accelerator() else PLATFORM_CLASS
