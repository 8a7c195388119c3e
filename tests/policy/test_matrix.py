"""Every installed policy passes the same checks; a policy file is small, linked and honest."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from tests.policy.matrix import SHAPES, check_policy, check_view_is_frozen, make_view
from vtoken_sglang.policy.base import Policy, PolicyView
from vtoken_sglang.policy.names import BUILT_IN
from vtoken_sglang.policy.registry import load_policy

MAX_LINES = 49


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize(("positions", "logical_len"), SHAPES)
@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_policy_matrix(name: str, positions: list[int], logical_len: int, seed: int) -> None:
    check_policy(load_policy(name), make_view(positions, logical_len, seed))


def test_a_view_cannot_be_rebound() -> None:
    check_view_is_frozen(make_view([0, 1], 2))


class _WritesToItsView(Policy):
    def score(self, view: PolicyView) -> torch.Tensor:
        view.positions.add_(1)
        return view.positions.to(torch.float32)


class _RemembersCalls(Policy):
    def __init__(self) -> None:
        self.calls = 0

    def score(self, view: PolicyView) -> torch.Tensor:
        self.calls += 1
        return torch.full_like(view.positions, self.calls, dtype=torch.float32)


class _NotFinite(Policy):
    def score(self, view: PolicyView) -> torch.Tensor:
        return torch.full_like(view.positions, float("inf"), dtype=torch.float32)


class _WrongType(Policy):
    def score(self, view: PolicyView) -> torch.Tensor:
        return view.positions.to(torch.float64)


class _WrongShape(Policy):
    def score(self, view: PolicyView) -> torch.Tensor:
        return view.positions[1:].to(torch.float32)


@pytest.mark.parametrize(
    "broken", [_WritesToItsView, _RemembersCalls, _NotFinite, _WrongType, _WrongShape]
)
def test_the_matrix_notices_a_broken_policy(broken: type[Policy]) -> None:
    with pytest.raises(AssertionError):
        check_policy(broken(), make_view(*SHAPES[0]))


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_policy_file_is_small_and_says_where_it_comes_from(name: str) -> None:
    module = importlib.import_module(BUILT_IN[name].partition(":")[0])
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert module.__doc__ is not None
    assert "https://" in module.__doc__
    words = " ".join(module.__doc__.split())
    assert "one kept set serves all layers and heads" in words
    policy = load_policy(name)
    if policy.reads_keys or policy.observation() is not None:
        assert "cached prefix" in words
