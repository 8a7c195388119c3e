"""Policies by name, built-in and from a third party's real distribution metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.policy.matrix import SHAPES, check_policy, make_view
from vtoken_sglang.errors import ConfigError
from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy.eviction import choose_evicted
from vtoken_sglang.policy.names import BUILT_IN, ENTRY_POINT_GROUP, policy_targets
from vtoken_sglang.policy.registry import (
    available,
    check_observed,
    describe_policies,
    load_policy,
)

MODULE = '''
"""Keeps old tokens."""
from dataclasses import dataclass
import torch
from vtoken_sglang.policy.base import Gather, Observation, Policy, PolicyView

@dataclass(frozen=True)
class OldestFirst(Policy):
    """Old tokens score high."""

    slope: float = 2.0

    def score(self, view: PolicyView) -> torch.Tensor:
        return -self.slope * view.positions.to(torch.float32)

@dataclass(frozen=True)
class NeedsArgument(Policy):
    slope: float

    def score(self, view: PolicyView) -> torch.Tensor:
        return view.positions.to(torch.float32)

class CannotSay(OldestFirst):
    def observation(self):
        raise LookupError("no idea")

class NoWindow(OldestFirst):
    def observation(self):
        return Observation(Gather.BELOW_UNIFORM)

class SaysNonsense(OldestFirst):
    def observation(self):
        return "attention"

def not_a_policy() -> None: ...
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a distribution with the given entry points on the path, as an installer would."""

    def put(**points: str) -> None:
        (tmp_path / "oldest_first.py").write_text(MODULE, encoding="utf-8")
        info = tmp_path / "oldest_first-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: oldest-first\nVersion: 1.0\n")
        lines = [f"[{ENTRY_POINT_GROUP}]", *(f"{name} = {to}" for name, to in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        policy_targets.cache_clear()
        load_policy.cache_clear()

    yield put
    monkeypatch.undo()
    policy_targets.cache_clear()
    load_policy.cache_clear()


def test_built_in_names_load_and_describe_themselves() -> None:
    by_name = {info.name: info for info in available()}
    assert set(by_name) >= set(BUILT_IN)
    for name in BUILT_IN:
        assert by_name[name].built_in
        assert by_name[name].problem == ""
        assert by_name[name].doc
        assert load_policy(name) is load_policy(name)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="streaming_llm") as caught:
        load_policy("streaming-llm")
    assert caught.value.value == "streaming-llm"


def test_a_policy_that_looks_at_attention_is_refused_where_none_is_observed() -> None:
    for name in ("random", "streaming_llm", "knorm", "keydiff"):
        check_observed(name, "none", "vtoken.policy")
    for name in ("h2o", "scissorhands", "snapkv", "tova"):
        check_observed(name, "last", "vtoken.policy")
        with pytest.raises(ConfigError, match="observes none") as caught:
            check_observed(name, "none", "vtoken.policy")
        assert (caught.value.field, caught.value.value) == ("vtoken.policy", name)


def test_third_party_policy_installs_without_touching_the_project(install: Install) -> None:
    install(oldest_first="oldest_first:OldestFirst")
    config = VTokenConfig(policy="oldest_first", budget=50, sink=2, recent=8)
    policy = load_policy("oldest_first")
    for positions, logical_len in SHAPES:
        check_policy(policy, make_view(positions, logical_len))
    evicted = choose_evicted(
        policy,
        live_positions=np.arange(100),
        logical_len=100,
        options=RequestOptions.resolve(config, None),
        eligible_below=100,
    )
    assert evicted.tolist() == list(range(42, 92))
    (info,) = [info for info in available() if info.name == "oldest_first"]
    assert not info.built_in
    assert info.parameters == (("slope", "2.0"),)
    text = describe_policies()
    assert "oldest_first  [oldest_first:OldestFirst]" in text
    assert "Old tokens score high." in text
    assert "slope = 2.0 (fixed:" in text


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("no_such_module_here:Policy", "cannot be loaded"),
        ("oldest_first:Missing", "cannot be loaded"),
        ("oldest_first:not_a_policy", "must be a subclass"),
        ("oldest_first:NeedsArgument", "must need no arguments"),
        ("oldest_first:CannotSay", "must say what it observes.*LookupError"),
        ("oldest_first:NoWindow", "must say what it observes.*window of at least 1"),
        ("oldest_first:SaysNonsense", "must say what it observes.*'attention'"),
    ],
)
def test_a_broken_third_party_policy_is_named_and_the_others_stay(
    install: Install, target: str, rule: str
) -> None:
    install(broken=target)
    with pytest.raises(ConfigError, match=rule) as caught:
        load_policy("broken")
    assert caught.value.field == "policy broken"
    for observes in ("all", "none"):  # at start-up, and for a request
        with pytest.raises(ConfigError, match=rule):
            check_observed("broken", observes, "vtoken.policy")
    text = describe_policies()
    assert "NOT USABLE" in text
    assert "streaming_llm  [built in]" in text
    load_policy("random")


@pytest.mark.parametrize("name", ["random", "none"])
def test_a_taken_name_is_refused(install: Install, name: str) -> None:
    install(**{name: "oldest_first:OldestFirst"})
    with pytest.raises(ConfigError, match="already taken"):
        policy_targets()


def test_description_gives_every_shared_parameter_with_its_default() -> None:
    text = describe_policies()
    for line in ("budget (int, default not set)", "sink (int, default 4)", "seed (int, default 0)"):
        assert line in text
    assert all(f"{name}  [built in]" in text for name in BUILT_IN)
