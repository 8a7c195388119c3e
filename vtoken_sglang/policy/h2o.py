"""H2O: heavy hitters of accumulated attention (https://arxiv.org/abs/2306.14048).

Deviations: one kept set serves all layers and heads, so weights are averaged over query heads and
sampled layers before they are summed over queries (the paper keeps a set per head and layer); the
recent half of the budget is the runtime's `recent`; evictions come every `interval` tokens. Tokens
of a cached prefix count only queries that this request computed itself, unless
`reuse_prefix_scores` gives them what an earlier request gathered there. Tokens that no query saw
yet count as the best. For comparison: `snapkv` asks the same of the
queries that matter.
"""

from __future__ import annotations

from torch import Tensor

from vtoken_sglang.policy.base import Gather, Observation, Policy, PolicyView, attention_or_best


class H2O(Policy):
    """Tokens that received the least attention in all are evicted first."""

    def observation(self) -> Observation:
        return Observation(Gather.TOTAL)

    def score(self, view: PolicyView) -> Tensor:
        return attention_or_best(view)
