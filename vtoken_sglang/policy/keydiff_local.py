"""KeyDiff and its local form (https://arxiv.org/abs/2504.15364): a token stays if its key is unlike
the average key, or unlike those around it.

For what is cut before the question is known: carried conversations, shared prefixes. Ranks by both
are added, so neither's scale matters. Deviations: those of `keydiff`; the local form is not the
paper's, and one kept set serves all layers and heads. A cached prefix is scored like the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vtoken_sglang.policy.base import Keys, Policy, PolicyView, check_width, neighbour_sum, ranks


@dataclass(frozen=True)
class KeyDiffLocal(Policy):
    """Tokens whose keys are most like all others' and their neighbours' are evicted first.

    Fields:
        width: live tokens whose average key is the local one, odd.
    """

    reads_keys = Keys.BEFORE_ROTARY
    width: int = 129

    def __post_init__(self) -> None:
        check_width("width", self.width)

    def score(self, view: PolicyView) -> Tensor:
        similarities = []
        for keys in view.layer_keys():
            unit = normalize(keys, dim=-1)
            anchors = (unit.mean(dim=0), neighbour_sum(unit, self.width))
            alike = [(unit * normalize(anchor, dim=-1)).sum(dim=-1) for anchor in anchors]
            similarities.append(torch.stack(alike).mean(dim=-1))
        everywhere, nearby = torch.stack(similarities).mean(dim=0)
        return ranks(-everywhere) + ranks(-nearby)
