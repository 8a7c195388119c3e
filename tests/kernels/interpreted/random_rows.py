"""Random row tables with holes, for the kernel checks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of a batch. Lanes past the real ones are padding: row 0, span 1, one entry.

    Fields:
        rows: int32 [num_rows, width], 0 = evicted; row 0 is all zero.
        row_ids, spans: int64 [bs].
        lens: int64 [bs], live entries of each lane's span, 1 for padding.
        num_slots: slots are below it, 0 is the sink.
    """

    rows: torch.Tensor
    row_ids: torch.Tensor
    spans: torch.Tensor
    lens: torch.Tensor
    num_slots: int

    @property
    def indptr(self) -> torch.Tensor:
        """int32 [bs + 1], cumulative `lens`."""
        ends = self.lens.cumsum(0)
        return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


def make_batch(
    spans: list[int], *, evicted_share: float, padding: int = 0, width: int = 0, seed: int = 0
) -> Batch:
    """Give lane i of `spans` its own row, in shuffled rows and slots; evict `evicted_share` of
    it.

    The last position of a lane stays alive, as in a server.
    """
    generator = torch.Generator().manual_seed(seed)
    lanes, width = len(spans), max([width, 1, *spans])
    num_rows = lanes + 3
    num_slots = sum(spans) + 7
    rows = torch.zeros(num_rows, width, dtype=torch.int32)
    row_ids = torch.randperm(num_rows - 1, generator=generator)[:lanes] + 1
    free = torch.randperm(num_slots - 1, generator=generator).to(torch.int32) + 1
    lens, taken = [], 0
    for row, span in zip(row_ids.tolist(), spans, strict=True):
        rows[row] = 9_999_999  # never to be read past the span
        slots = free[taken : taken + span].clone()
        slots[: span - 1][torch.rand(max(span - 1, 0), generator=generator) < evicted_share] = 0
        rows[row, :span] = slots
        taken += span
        lens.append(int((slots != 0).sum()))
    zeros, ones = [0] * padding, [1] * padding
    return Batch(
        rows=rows,
        row_ids=torch.tensor([*row_ids.tolist(), *zeros]),
        spans=torch.tensor([*spans, *ones]),
        lens=torch.tensor([*lens, *ones]),
        num_slots=num_slots,
    )
