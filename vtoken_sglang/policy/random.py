"""Random eviction: the control every other policy has to beat.

A token's score is a hash of (seed, position) alone: SplitMix64, https://doi.org/10.1145/2660193.2660195.
So a token's rank never changes, and arms and repeats with one seed evict the same tokens however
their steps fall. No paper defines this policy; sinks and recent tokens are kept as for the others,
and one kept set serves all layers and heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vtoken_sglang.policy.base import Policy, PolicyView

# The three odd SplitMix64 constants as signed 64-bit integers: torch wraps products modulo 2**64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_FLOAT32_BITS = 24


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift; torch's own copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


class Random(Policy):
    """Tokens are evicted in an order drawn once from the seed."""

    def score(self, view: PolicyView) -> Tensor:
        bits = (view.positions + 1) * _GAMMA + view.request_seed
        bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
        bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
        bits = bits ^ _shift_right(bits, 31)
        score: Tensor = _shift_right(bits, 64 - _FLOAT32_BITS).to(torch.float32)
        return score
