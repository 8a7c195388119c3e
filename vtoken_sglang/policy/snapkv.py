"""SnapKV: what the end of the prompt attends to (https://arxiv.org/abs/2404.14469).

Deviations: one kept set serves all layers and heads, so the window's weights are averaged over
query heads and sampled layers (the paper keeps a set per head); only queries of the prompt's last
chunk are seen, so after a cache hit or a short last chunk the window is shorter; smoothing runs
over live neighbours. Nothing dies before the prompt has ended. The window and everything after it,
which nobody observed, count as the best, so answers push out the prompt first. A cached prefix is
seen by the window like the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn.functional import avg_pool1d

from vtoken_sglang.policy.base import Gather, Observation, Policy, PolicyView, attention_or_best


@dataclass(frozen=True)
class SnapKV(Policy):
    """Prompt tokens that the last prompt queries hardly looked at die first.

    Fields:
        window: prompt queries observed. kernel: odd width of the average over neighbours.
    """

    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError("window must be at least 1")
        if not (self.kernel % 2 and 1 <= self.kernel <= 127):
            raise ValueError("kernel must be an odd number from 1 to 127")

    def observation(self) -> Observation:
        return Observation(Gather.PROMPT_END, self.window)

    def score(self, view: PolicyView) -> Tensor:
        assert view.attention is not None
        smooth = avg_pool1d(view.attention[None], self.kernel, stride=1, padding=self.kernel // 2)
        return attention_or_best(replace(view, attention=smooth[0]))
