"""StreamingLLM: attention sinks and a sliding window (https://arxiv.org/abs/2309.17453).

Deviations: tokens keep their original RoPE positions (the paper renumbers positions inside the
cache); one kept set serves all layers and heads; the window shrinks back to its size every
`interval` tokens, not at each one; with `keep` the window grows with the text. The sinks are the
runtime's `sink` first tokens, so `sink = 0` gives plain window attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtoken_sglang.policy.base import Policy, PolicyView


class StreamingLLM(Policy):
    """First tokens and most recent tokens are kept, everything between them goes."""

    def score(self, view: PolicyView) -> Tensor:
        return view.positions.to(torch.float32)
