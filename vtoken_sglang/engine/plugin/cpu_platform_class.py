"""The platform class itself; imported only after `cpu_platform.activate` chose it."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang on plain PyTorch CPU operators: no graphs, no Triton, eager compile backend."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        """Return "cpu". SGLang's argument resolution expects the device as a string."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"
