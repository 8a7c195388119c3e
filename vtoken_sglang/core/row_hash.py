"""Byte hashes of K/V rows, over all layers, for `check` mode and tests."""

from collections.abc import Sequence
from typing import Final

import torch

from vtoken_sglang.core.types import Int64Array

_WEIGHT_SEED: Final = 0x5EED
_MIX: Final = 0x100000001B3
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def row_hashes(buffers: Sequence[torch.Tensor], slots: Int64Array) -> torch.Tensor:
    """Hash of the bytes at each slot over all buffers: int64 [n], on the buffers' device.

    Sums of words times random odd weights, modulo 2**64: any single changed word changes the hash,
    and so does a swap of rows between buffers. Equal bytes give equal hashes, NaN included.
    """
    index = torch.from_numpy(slots).to(buffers[0].device)
    total = torch.zeros(len(slots), dtype=torch.int64, device=index.device)
    for buffer in buffers:
        rows = buffer.index_select(0, index).flatten(1)
        row_bytes = rows.shape[1] * rows.element_size()
        word = next(dtype for size, dtype in _WORDS if row_bytes % size == 0)
        words = rows.contiguous().view(word).to(torch.int64)
        total = total * _MIX + (words * _weights(words.shape[1], index.device)).sum(1)
    return total


def _weights(count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_WEIGHT_SEED)
    limit = 2**62
    weights = torch.randint(-limit, limit, (count,), dtype=torch.int64, generator=generator)
    return (weights | 1).to(device)
