"""What the machine's memory gives a plain large read and a plain large copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from vtoken_sglang_eval.metrics import spread

BYTES = 1 << 30
"""Far beyond any private cache; a large shared L3 may still help."""


def measure_bandwidth(repeats: int) -> dict[str, Any]:
    """GB/s of reading (a sum) and of copying (bytes read plus bytes written), float32.

    Uses PyTorch's current number of threads.
    """
    source = torch.ones(BYTES // 4)
    target = torch.empty_like(source)
    return {
        "bytes": BYTES,
        "read_gb_s": _rate(source.sum, BYTES, repeats),
        "copy_gb_s": _rate(lambda: target.copy_(source), 2 * BYTES, repeats),
    }


def _rate(operation: Callable[[], Any], moved: int, repeats: int) -> dict[str, float]:
    operation()
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        operation()
        rates.append(moved / (time.perf_counter() - began) / 1e9)
    return spread(rates)
