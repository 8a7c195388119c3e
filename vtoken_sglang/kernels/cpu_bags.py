"""Weighted sums over lists of table rows ("bags"), summed in the order of the list."""

from __future__ import annotations

import torch

_SUM_MODE = 0


def bag_starts(widths: list[int], q_heads: int) -> torch.Tensor:
    """Where each bag begins when every one of `widths` is the length of `q_heads` bags, int64."""
    lengths = torch.tensor(widths).repeat_interleave(q_heads)
    return lengths.cumsum(0) - lengths


def weighted_sums(
    table: torch.Tensor, bags: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Per bag, the weighted sum of its rows of `table`, in order; in `table`'s dtype."""
    weights = weights.to(table.dtype)
    found = torch.embedding_bag(table, bags, starts, False, _SUM_MODE, False, weights)
    sums: torch.Tensor = found[0]
    return sums
