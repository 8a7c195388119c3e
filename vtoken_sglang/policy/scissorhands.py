"""Scissorhands: importance persists over a history window (https://arxiv.org/abs/2305.17118).

A query finds a token unimportant when it gives it less than an equal share of its attention; the
tokens found unimportant most often in the window go. Deviations: one kept set serves all layers
and heads, each of which counts for itself, and counts are averaged over query heads and sampled
layers (the paper keeps a set per head and shares the budget out over layers); the window is cut at
multiples of `window` positions, so it holds the last one to two times `window` queries; evictions
come every `interval` tokens. Tokens that nobody observed, a cached prefix before its first query
included, were never found unimportant; `reuse_prefix_scores` gives a cached prefix earlier counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vtoken_sglang.policy.base import Gather, Observation, Policy, PolicyView


@dataclass(frozen=True)
class Scissorhands(Policy):
    """Tokens that most often received less than an equal share die first.

    Fields:
        window: tokens in a block of the history window.
    """

    window: int = 400

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError("window must be at least 1")

    def observation(self) -> Observation:
        return Observation(Gather.BELOW_UNIFORM, self.window)

    def score(self, view: PolicyView) -> Tensor:
        assert view.attention is not None
        return -view.attention
