"""KeyDiff: keys that resemble the average key are redundant (https://arxiv.org/abs/2504.15364).

Deviations: one kept set serves all layers and heads, so cosine similarities are averaged over key
heads and layers (the paper cuts each head alone); the average key is taken over the live tokens
each time the runtime looks, not per block of the prompt. A cached prefix is scored like the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from vtoken_sglang.policy.base import Policy, PolicyView


class KeyDiff(Policy):
    """Tokens whose keys are most like the mean direction of all live keys die first."""

    reads_keys = True

    def score(self, view: PolicyView) -> Tensor:
        similarities = []
        for keys in view.layer_keys():
            anchor = normalize(keys, dim=-1).mean(dim=0, keepdim=True)
            similarities.append(cosine_similarity(keys, anchor, dim=-1).mean(dim=-1))
        return -torch.stack(similarities).mean(dim=0)
