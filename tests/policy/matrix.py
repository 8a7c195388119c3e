"""What every policy must hold, as one function: used for the built-in ones and by third parties."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from torch import Tensor

from vtoken_sglang.policy.base import Policy, PolicyView

# (live positions, logical length): dense, one token, with gaps, far out, most of it dead.
SHAPES: tuple[tuple[list[int], int], ...] = (
    (list(range(64)), 64),
    ([0], 1),
    ([0, 1, 2, 3, 7, 8, 20, 33, 34, 60], 61),
    ([0, *range(100_000, 100_040)], 100_040),
    (list(range(0, 4096, 17)), 4096),
)


LAYERS, KV_HEADS, DIM = 2, 3, 8


def make_view(positions: list[int] | Tensor, logical_len: int, seed: int = 0) -> PolicyView:
    """A view with everything a policy may ask for, drawn from the seed; the last live token has
    not been observed yet."""
    live = torch.as_tensor(positions, dtype=torch.int64)
    draw = torch.Generator().manual_seed(seed % 2**31)
    attention = torch.rand(len(live), generator=draw)
    keys = [torch.randn(len(live), KV_HEADS, DIM, generator=draw) for _ in range(LAYERS)]
    observed_len = int(live[-1])
    return PolicyView(
        positions=live,
        logical_len=logical_len,
        request_seed=seed,
        attention=attention.masked_fill(live >= observed_len, 0.0),
        observed_len=observed_len,
        layer_keys=lambda: iter(keys),
    )


def check_policy(policy: Policy, view: PolicyView) -> None:
    """Shape, dtype, device, finiteness, repeatability, and that the view is left alone."""
    before = view.positions.clone()
    assert view.attention is not None
    attention = view.attention.clone()
    scores = policy.score(view)
    assert scores.shape == view.positions.shape
    assert scores.dtype == torch.float32
    assert scores.device == view.positions.device
    assert bool(scores.isfinite().all())
    kept = scores.clone()
    assert torch.equal(policy.score(view), kept), "the same view scored differently"
    assert torch.equal(scores, kept), "a later call changed an earlier result"
    assert torch.equal(view.positions, before), "the policy wrote to its view"
    assert torch.equal(view.attention, attention), "the policy wrote to its view"
    assert scores.data_ptr() not in (view.positions.data_ptr(), view.attention.data_ptr())


def check_view_is_frozen(view: PolicyView) -> None:
    for field in fields(view):
        with pytest.raises(FrozenInstanceError):
            setattr(view, field.name, None)
