"""SnapKV over whole pages (https://arxiv.org/abs/2404.14469): a page counts as its best token.

What is evicted lies in whole pages, but for one, so pages are given back and hardly a token is
copied. Deviations: those of `snapkv`; choosing by pages is not the paper's, and one kept set serves
all layers and heads. A cached prefix is seen by the window like the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vtoken_sglang.policy.base import PolicyView
from vtoken_sglang.policy.snapkv import SnapKV


@dataclass(frozen=True)
class SnapKVPages(SnapKV):
    """Pages of the prompt that the last prompt queries hardly looked at are evicted first.

    Fields: see `snapkv`.
    """

    def score(self, view: PolicyView) -> Tensor:
        scores = super().score(view)
        pages = view.positions // view.page_size
        best = scores.new_zeros(-(-view.logical_len // view.page_size))
        return best.scatter_reduce(0, pages, scores, "amax", include_self=False)[pages]
