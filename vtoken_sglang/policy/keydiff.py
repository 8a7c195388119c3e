"""KeyDiff: keys that resemble the average key are redundant (https://arxiv.org/abs/2504.15364).

Deviations: keys are compared as they were before rotary embedding, which otherwise hides how alike
they are (`rotary = true` is the paper's); one kept set serves all layers and heads, so cosine
similarities are averaged over key heads and layers (the paper cuts each head alone); the average
key is taken over the live tokens each time the runtime looks, not per block of the prompt. A cached
prefix is scored like the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vtoken_sglang.policy.base import Keys, Policy, PolicyView


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Tokens whose keys are most like the mean direction of all live keys are evicted first.

    Fields:
        rotary: compare keys with their rotary embedding applied.
    """

    rotary: bool = False

    @property
    def reads_keys(self) -> Keys:
        return Keys.CACHED if self.rotary else Keys.BEFORE_ROTARY

    def score(self, view: PolicyView) -> Tensor:
        similarities = []
        for keys in view.layer_keys():
            unit = normalize(keys, dim=-1)
            anchor = normalize(unit.mean(dim=0), dim=-1)
            similarities.append((unit * anchor).sum(dim=-1).mean(dim=-1))
        return -torch.stack(similarities).mean(dim=0)
