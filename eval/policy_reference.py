"""What each policy's score is, from the attention matrices and keys of a plain model, in float64.

Written from the policies' papers and stated deviations, not from their code: everything at once,
over full matrices, where the product gathers per live token as it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One request's attention up to some length.

    Fields:
        weights: float [layers, heads, L, L], softmax weights by (query, key); 0 where not seen.
        visible: bool [L, L], which keys each query saw.
        keys: per layer [L, kv_heads, dim], rotary embedding applied.
        plain_keys: the same before rotary embedding.
        first_query: queries below it were not computed by this request (cached prefix).
        last_chunk: (first query of the prompt's last chunk, prompt length).
        every: queries at multiples of it are observed.
        page_size: tokens of a page.
        seed: float64 [n], what an earlier request gathered on the first n positions (h2o,
            scissorhands); empty for nothing.
    """

    weights: Tensor
    visible: Tensor
    keys: list[Tensor]
    plain_keys: list[Tensor]
    first_query: int
    last_chunk: tuple[int, int]
    every: int = 1
    page_size: int = 1
    seed: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def queries(self, start: int, end: int) -> list[int]:
        """Observed queries in [start, end)."""
        return [q for q in range(max(start, self.first_query), end) if q % self.every == 0]

    def mean(self) -> Tensor:
        """float64 [L, L], mean weights over layers and heads."""
        return self.weights.double().mean(dim=(0, 1))


def h2o(seen: Observed, length: int) -> Tensor:
    queries = seen.queries(0, length)
    total = seen.mean()[queries, :length].sum(dim=0)
    total[: len(seen.seed)] += seen.seed
    return _newest_as_best(total, queries[-1] + 1)


def tova(seen: Observed, length: int, kernel: int = 5) -> Tensor:
    last = seen.queries(0, length)[-1]
    weights = seen.mean()[last, :length].clone()
    return _newest_as_best(_over_neighbours(seen, weights, kernel), last + 1)


def snapkv(
    seen: Observed, length: int, window: int = 16, kernel: int = 5, pool: str = "max"
) -> Tensor:
    first, prompt_len = seen.last_chunk
    start = max(first, prompt_len - window)
    by_head = seen.weights[:, :, start:prompt_len, :length].double().sum(dim=2)
    pooled = by_head.amax(dim=1) if pool == "max" else by_head.mean(dim=1)
    total = pooled.mean(dim=0)
    total[start:] = 0
    return _newest_as_best(_over_neighbours(seen, total, kernel), start)


def snapkv_pages(seen: Observed, length: int, **options: Any) -> Tensor:
    scores = snapkv(seen, length, **options)
    live = seen.visible[length - 1, :length].nonzero().flatten().tolist()
    best: dict[int, float] = {}
    for pos in live:
        page = pos // seen.page_size
        best[page] = max(best.get(page, 0.0), float(scores[pos]))
    return torch.tensor(
        [best.get(pos // seen.page_size, 0.0) for pos in range(length)], dtype=torch.float64
    )


def scissorhands(seen: Observed, length: int, window: int = 400) -> Tensor:
    last = seen.queries(0, length)[-1]
    count = torch.zeros(length, dtype=torch.float64)
    count[: len(seen.seed)] += seen.seed
    for query in seen.queries((last // window - 1) * window, length):
        saw = seen.visible[query, :length]
        below_uniform = seen.weights[:, :, query, :length] < 1 / int(saw.sum())
        count += (below_uniform & saw).double().mean(dim=(0, 1))
    return -count


def knorm(seen: Observed, length: int) -> Tensor:
    norms = [keys[:length].double().norm(dim=-1).mean(dim=-1) for keys in seen.keys]
    return -torch.stack(norms).mean(dim=0)


def keydiff(seen: Observed, length: int, rotary: bool = False, width: int = 0) -> Tensor:
    """`width`: live tokens around each that make its anchor; 0 for all of them."""
    live = seen.visible[length - 1, :length].nonzero().flatten()
    found = torch.zeros(length, dtype=torch.float64)
    layers = seen.keys if rotary else seen.plain_keys
    for keys in layers:
        unit = keys[:length].double() / keys[:length].double().norm(dim=-1, keepdim=True)
        unit, reach = unit[live], width // 2
        anchor = unit.mean(dim=0, keepdim=True)
        if width:
            around = [unit[max(0, at - reach) : at + reach + 1] for at in range(len(live))]
            anchor = torch.stack([near.mean(dim=0) for near in around])
        alike = torch.nn.functional.cosine_similarity(unit, anchor, dim=-1)
        found[live] -= alike.mean(dim=-1) / len(layers)
    return found


def keydiff_local(seen: Observed, length: int, width: int = 129) -> Tensor:
    nearby = keydiff(seen, length, width=width)
    return _rank(seen, keydiff(seen, length)) + _rank(seen, nearby)


def keydiff_snapkv(seen: Observed, length: int, **options: Any) -> Tensor:
    return _rank(seen, keydiff(seen, length)) + _rank(seen, snapkv(seen, length, **options))


SCORES: dict[str, Callable[..., Tensor]] = {
    "h2o": h2o,
    "tova": tova,
    "snapkv": snapkv,
    "scissorhands": scissorhands,
    "knorm": knorm,
    "keydiff": keydiff,
    "keydiff_local": keydiff_local,
    "keydiff_snapkv": keydiff_snapkv,
    "snapkv_pages": snapkv_pages,
}
"""Policy name -> score(seen, length): float64 [length], evicted positions included."""


def _over_neighbours(seen: Observed, total: Tensor, kernel: int) -> Tensor:
    """Average over the `kernel` nearest live tokens, as if there were zeros beyond the ends."""
    live = seen.visible[len(total) - 1, : len(total)].nonzero().flatten()
    values, reach = total[live], kernel // 2
    smooth = torch.zeros_like(total)
    for index, pos in enumerate(live.tolist()):
        smooth[pos] = values[max(0, index - reach) : index + reach + 1].sum() / kernel
    return smooth


def _rank(seen: Observed, scores: Tensor) -> Tensor:
    """Live tokens that score less, or equally and stand before, as a share of the live tokens."""
    live = seen.visible[len(scores) - 1, : len(scores)].nonzero().flatten().tolist()
    found = torch.zeros_like(scores)
    for place, pos in enumerate(sorted(live, key=lambda pos: (float(scores[pos]), pos))):
        found[pos] = place / len(live)
    return found


def _newest_as_best(scores: Tensor, unseen_from: int) -> Tensor:
    scores[unseen_from:] = scores[:unseen_from].max()
    return scores
