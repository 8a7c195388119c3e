"""Reused work buffers for the CPU attention kernels.

A fresh buffer of a few megabytes is a fresh memory mapping, and touching it costs a page fault
per 4 KiB: more than the copy into it. So buffers are kept, one per name and dtype, and grow only.
"""

from __future__ import annotations

import math

import torch


class Scratch:
    """Named, growing CPU buffers.

    A view returned by `take` is valid until the next `take` of the same name and dtype.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor of `shape` over the buffer `name`."""
        numel = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=dtype)
            self._buffers[(name, dtype)] = buffer
        return buffer[:numel].view(shape)
