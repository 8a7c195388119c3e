"""What each policy's score is, from the attention matrices and keys of a plain model, in float64.

Written from the policies' papers and stated deviations, not from their code: everything at once,
over full matrices, where the product gathers per live token as it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One request's attention up to some length.

    Fields:
        weights: float [layers, heads, L, L], softmax weights by (query, key); 0 where not seen.
        visible: bool [L, L], which keys each query saw.
        keys: per layer [L, kv_heads, dim], rotary embedding applied.
        first_query: queries below it were not computed by this request (cached prefix).
        last_chunk: (first query of the prompt's last chunk, prompt length).
        every: queries at multiples of it are observed.
        seed: float64 [n], what an earlier request gathered on the first n positions (h2o,
            scissorhands); empty for nothing.
    """

    weights: Tensor
    visible: Tensor
    keys: list[Tensor]
    first_query: int
    last_chunk: tuple[int, int]
    every: int = 1
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


def tova(seen: Observed, length: int) -> Tensor:
    last = seen.queries(0, length)[-1]
    return _newest_as_best(seen.mean()[last, :length].clone(), last + 1)


def snapkv(seen: Observed, length: int, window: int = 64, kernel: int = 5) -> Tensor:
    first, prompt_len = seen.last_chunk
    start = max(first, prompt_len - window)
    total = seen.mean()[start:prompt_len, :length].sum(dim=0)
    total[start:] = 0
    live = seen.visible[length - 1, :length].nonzero().flatten()
    values = total[live]
    reach = kernel // 2
    smooth = torch.zeros_like(total)
    for index, pos in enumerate(live.tolist()):
        smooth[pos] = values[max(0, index - reach) : index + reach + 1].sum() / kernel
    return _newest_as_best(smooth, start)


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


def keydiff(seen: Observed, length: int) -> Tensor:
    live = seen.visible[length - 1, :length]
    found = torch.zeros(length, dtype=torch.float64)
    for keys in seen.keys:
        unit = keys[:length].double() / keys[:length].double().norm(dim=-1, keepdim=True)
        anchor = unit[live].mean(dim=0)
        anchor = anchor / anchor.norm(dim=-1, keepdim=True)
        found -= (unit * anchor).sum(dim=-1).mean(dim=-1) / len(seen.keys)
    return found


SCORES: dict[str, Callable[..., Tensor]] = {
    "h2o": h2o,
    "tova": tova,
    "snapkv": snapkv,
    "scissorhands": scissorhands,
    "knorm": knorm,
    "keydiff": keydiff,
}
"""Policy name -> score(seen, length): float64 [length], dead positions included."""


def _newest_as_best(scores: Tensor, unseen_from: int) -> Tensor:
    scores[unseen_from:] = scores[:unseen_from].max()
    return scores
