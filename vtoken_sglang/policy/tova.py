"""TOVA: the token that the newest one attends to least goes (https://arxiv.org/abs/2401.06104).

Deviations: one kept set serves all layers and heads, so weights are averaged over query heads and
sampled layers (the paper averages heads, and decides per layer), and over live neighbours, so that
a word is kept whole (`kernel = 1` is the paper's); evictions come every `interval` tokens, by the
weights of the last observed query; sinks and `recent` tokens are kept beside. Tokens of a cached
prefix are seen by that query like all others; newer ones than it count as the best.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vtoken_sglang.policy.base import (
    Gather,
    Observation,
    Policy,
    PolicyView,
    attention_or_best,
    check_width,
)


@dataclass(frozen=True)
class TOVA(Policy):
    """Tokens with the least weight at the last query are evicted first.

    Fields:
        kernel: odd width of the average over neighbours.
    """

    kernel: int = 5

    def __post_init__(self) -> None:
        check_width("kernel", self.kernel)

    def observation(self) -> Observation:
        return Observation(Gather.LAST)

    def score(self, view: PolicyView) -> Tensor:
        return attention_or_best(view, self.kernel)
