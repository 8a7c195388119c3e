"""Every other token goes first: an example of what a policy of one's own looks like."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vtoken_sglang.policy.base import Policy, PolicyView


@dataclass(frozen=True)
class EveryOther(Policy):
    """Positions that `stride` does not divide die before those it does, old ones first.

    Fields:
        stride: 2 or more.
    """

    stride: int = 2

    def score(self, view: PolicyView) -> Tensor:
        divides = (view.positions % self.stride == 0).float()
        return view.positions.float() + divides * view.logical_len
