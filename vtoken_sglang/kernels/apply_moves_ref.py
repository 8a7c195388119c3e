"""PyTorch reference of `apply_moves`."""

from __future__ import annotations

import torch


def apply_moves_ref(
    rows: torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """See `apply_moves`."""
    kept = row_ids > 0
    rows[row_ids[kept].long(), positions[kept].long()] = slots[kept].to(rows.dtype)
