"""L2 norm of keys: a low norm means high attention later (https://arxiv.org/abs/2406.11430).

Deviations: one kept set serves all layers and heads, so norms are averaged over key heads and
layers (the paper cuts each head alone, and leaves its first layers whole); tokens of a cached
prefix are scored like all others, since their keys are there.
For comparison: `keydiff` makes more of the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtoken_sglang.policy.base import Keys, Policy, PolicyView


class Knorm(Policy):
    """Tokens with the largest keys are evicted first."""

    reads_keys = Keys.CACHED

    def score(self, view: PolicyView) -> Tensor:
        norms = [keys.norm(dim=-1).mean(dim=-1) for keys in view.layer_keys()]
        return -torch.stack(norms).mean(dim=0)
