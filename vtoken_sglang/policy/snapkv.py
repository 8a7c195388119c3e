"""SnapKV: what the end of the prompt attends to (https://arxiv.org/abs/2404.14469).

Deviations: one kept set serves all layers and heads, so a token counts what the head of a layer
gives it that gives it most, averaged over sampled layers (the paper keeps a set per head); the
window is about a question long (nearer to the paper: `window = 64`, `pool = mean`); only queries of
the prompt's last chunk are seen, of a cached prefix none; smoothing runs over live neighbours. Only
once a prompt has ended it is pruned; what nobody observed counts as the best, so it goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vtoken_sglang.policy.base import (
    Gather,
    Observation,
    Policy,
    PolicyView,
    Pool,
    attention_or_best,
    check_width,
)


@dataclass(frozen=True)
class SnapKV(Policy):
    """Prompt tokens that the last prompt queries hardly looked at are evicted first.

    Fields:
        window: prompt queries observed. kernel: odd width of the average over neighbours.
        pool: over a layer's query heads, `max` or `mean`.
    """

    window: int = 16
    kernel: int = 5
    pool: str = "max"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError("window must be at least 1")
        check_width("kernel", self.kernel)

    def observation(self) -> Observation:
        return Observation(Gather.PROMPT_END, self.window, Pool(self.pool))

    def score(self, view: PolicyView) -> Tensor:
        return attention_or_best(view, self.kernel)
