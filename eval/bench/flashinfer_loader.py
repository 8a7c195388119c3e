"""FlashInfer's attention wrappers, from a whole installation or from a part that was carried along.

`import flashinfer` pulls in every family of kernels and their toolchains. Attention alone needs
the modules below, some headers and tvm-ffi: little enough to carry to a machine that cannot
install anything (`scripts/gpu_carry.py`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from types import SimpleNamespace
from typing import Any

NAMES = {
    "BatchDecodeWithPagedKVCacheWrapper": "flashinfer.decode",
    "fast_decode_plan": "flashinfer.decode",
    "BatchPrefillWithPagedKVCacheWrapper": "flashinfer.prefill",
    "BatchPrefillWithRaggedKVCacheWrapper": "flashinfer.prefill",
    "merge_state": "flashinfer.cascade",
}


def load_flashinfer() -> Any:
    """A namespace with the wrappers of `NAMES`.

    Raises:
        ImportError: neither a whole nor a carried flashinfer is there; the message says what
            was missing.
    """
    try:
        importlib.import_module("flashinfer")
    except ImportError as whole:
        try:
            _enter_package()
            return _collect()
        except ImportError as part:
            raise ImportError(f"{whole}; without its package init: {part}") from part
    return _collect()


def _enter_package() -> None:
    """Make the submodules importable without running the package's own init."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no flashinfer on the path")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
    package = types.ModuleType("flashinfer")
    package.__path__ = list(spec.submodule_search_locations)
    package.__file__ = spec.origin
    sys.modules["flashinfer"] = package


def _collect() -> SimpleNamespace:
    found = {name: getattr(importlib.import_module(at), name) for name, at in NAMES.items()}
    return SimpleNamespace(**found)
