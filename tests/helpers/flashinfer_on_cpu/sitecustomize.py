"""Makes a CPU server attend through our flashinfer backend, on FlashInfer's stand-in.

Python imports this module at start-up in every process whose PYTHONPATH names this folder: the
server's launcher and scheduler. What the product does on a GPU machine is done here by hand once
its modules are loaded; nothing in the product knows of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def replace_backends(backends: ModuleType) -> None:
    """Register our flashinfer backend under the name that a CPU server asks for."""

    def install_backends(config: Any) -> None:
        from sglang.srt.layers.attention import flashinfer_backend
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.mem_cache import kv_index_translator

        from tests.helpers import flashinfer_stand_in as stand_in
        from tests.helpers.attention_batches import CudaOnCpu, StockIndexKernel
        from vtoken_sglang.engine.attention.flashinfer import VTokenFlashInferAttnBackend

        for name in stand_in.__all__:
            setattr(flashinfer_backend, name, getattr(stand_in, name))
        flashinfer_backend._safe_merge_state = stand_in.merge_state
        kv_index_translator.create_flashinfer_kv_indices_triton = StockIndexKernel()
        CudaOnCpu().__enter__()  # for the life of the process
        register_attention_backend("torch_native")(VTokenFlashInferAttnBackend)

    def verify_backend(model_runner: Any, config: Any) -> None:
        from vtoken_sglang.engine.attention.flashinfer import VTokenFlashInferAttnBackend

        backend = model_runner.attn_backend
        assert type(backend) is VTokenFlashInferAttnBackend, type(backend)
        print("served by the flashinfer backend on its stand-in", flush=True)

    backends.install_backends = install_backends
    backends.verify_backend = verify_backend


AFTER_IMPORT: dict[str, Callable[[ModuleType], None]] = {
    "vtoken_sglang.engine.attention.backends": replace_backends,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls the functions of `AFTER_IMPORT` when their module has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER_IMPORT:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            AFTER_IMPORT[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterImport())
