"""KeyDiff (https://arxiv.org/abs/2504.15364) and SnapKV (https://arxiv.org/abs/2404.14469) in one:
a token stays if its key is unlike the average key, or if the end of the prompt attends to it.

For prompts that end in their question; where it comes later, `keydiff_local` keeps more of what
will be asked. Ranks by both are added, so neither's scale matters. Deviations: those of `keydiff`
and of `snapkv`; adding them up is neither paper's, and one kept set serves all layers and heads. A
cached prefix is scored like the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vtoken_sglang.policy.base import Keys, PolicyView, ranks
from vtoken_sglang.policy.keydiff import KeyDiff
from vtoken_sglang.policy.snapkv import SnapKV


@dataclass(frozen=True)
class KeyDiffSnapKV(SnapKV):
    """Tokens like all others that the prompt's end hardly looked at are evicted first.

    Fields: see `snapkv`.
    """

    reads_keys = Keys.BEFORE_ROTARY

    def score(self, view: PolicyView) -> Tensor:
        return ranks(KeyDiff().score(view)) + ranks(super().score(view))
