"""Random row tables with holes, as a pruned server has them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of a batch; lanes past the real ones are padding (row 0, span 1, one entry).

    Fields:
        table: int32 [num_rows, width], 0 = dead; row 0 is all zero.
        row_ids, spans, lens: int64 [bs]; `lens` are live entries, 1 for padding.
        indptr: int32 [bs + 1], cumulative `lens`.
        num_slots: slots are below it, 0 is the sink.
    """

    table: torch.Tensor
    row_ids: torch.Tensor
    spans: torch.Tensor
    lens: torch.Tensor
    indptr: torch.Tensor
    num_slots: int


def random_rows(
    lanes: int,
    span: int,
    keep: float,
    device: torch.device,
    generator: torch.Generator,
    *,
    padding: int = 0,
    page_size: int = 1,
) -> Rows:
    """`lanes` rows of about `span` tokens in random pages, a share `keep` of each alive.

    A lane's last token is alive, as in a server; spans differ by up to a quarter, the first is
    `span`.
    """
    spans = [span, *(max(1, span - index * span // (4 * lanes)) for index in range(1, lanes))]
    pages_of = [-(-length // page_size) for length in spans]
    num_pages = sum(pages_of) + 1
    pages = torch.randperm(num_pages - 1, device=device, generator=generator) + 1
    table = torch.zeros(lanes + 1, span, dtype=torch.int32, device=device)
    offsets = torch.arange(page_size, device=device)
    lens, taken = [], 0
    for lane, (length, count) in enumerate(zip(spans, pages_of, strict=True)):
        slots = (pages[taken : taken + count, None] * page_size + offsets).flatten()[:length]
        taken += count
        dead = torch.rand(length, device=device, generator=generator) >= keep
        dead[-1] = False
        table[lane + 1, :length] = torch.where(dead, 0, slots).to(torch.int32)
        lens.append(int((~dead).sum()))
    spans_lens = torch.tensor([[*spans, *[1] * padding], [*lens, *[1] * padding]], device=device)
    ends = spans_lens[1].cumsum(0)
    return Rows(
        table=table,
        row_ids=torch.tensor([*range(1, lanes + 1), *[0] * padding], device=device),
        spans=spans_lens[0],
        lens=spans_lens[1],
        indptr=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
        num_slots=num_pages * page_size,
    )
