"""Policies by name, built-in and from a third party's real distribution metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.policy.matrix import SHAPES, check_policy, make_view
from vtoken_sglang.errors import ConfigError
from vtoken_sglang.option_values import request_label
from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy import registry
from vtoken_sglang.policy.eviction import choose_evicted
from vtoken_sglang.policy.names import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    check_installed,
    policy_targets,
)
from vtoken_sglang.policy.registry import describe_policies, load_policy, require_policy
from vtoken_sglang.policy.snapkv import SnapKV

MODULE = '''
"""Keeps old tokens."""
from dataclasses import dataclass
import torch
from vtoken_sglang.policy.base import Gather, Observation, Policy, PolicyView

@dataclass(frozen=True)
class OldestFirst(Policy):
    """Old tokens score high."""

    slope: float = 2.0
    label: str | None = None
    low: int = 1
    high: int = 5

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError("low must not be above high")

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
        forget()

    yield put
    monkeypatch.undo()
    forget()


def forget() -> None:
    for cached in (policy_targets, registry._load_class, load_policy):
        cached.cache_clear()


def table() -> dict[str, str]:
    """The rows of the table by policy."""
    lines = describe_policies().partition("\n\n")[0].splitlines()
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


def check(policy: str, observe_layers: str = "all", **arguments: object) -> None:
    config = VTokenConfig(policy=policy, keep=0.5, policy_args=arguments)  # type: ignore[arg-type]
    require_policy(config, observe_layers, request_label)


def test_built_in_names_load_and_describe_themselves() -> None:
    rows = table()
    assert set(rows) == {"policy", *policy_targets()}
    assert set(BUILT_IN) <= set(policy_targets())
    for name in BUILT_IN:
        assert "NOT USABLE" not in rows[name]
        assert rows[name].endswith(".")
        assert load_policy(name) is load_policy(name)
    assert rows["snapkv"].startswith("attention window=64 kernel=5 Prompt tokens")
    assert rows["knorm"].startswith("keys Tokens")
    assert rows["random"].startswith("positions Tokens")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    for refuse in (
        lambda: load_policy("streaming-llm"),
        lambda: check_installed("streaming-llm", "--vtoken-policy"),
        lambda: check("streaming-llm"),
    ):
        with pytest.raises(ConfigError, match="installed policy .none, .*streaming_llm") as caught:
            refuse()
        assert caught.value.value == "streaming-llm"
    check_installed("none", "--vtoken-policy")
    require_policy(VTokenConfig(), "none", request_label)
    with pytest.raises(ConfigError) as caught:
        check("x" * 1_000_000)
    assert len(str(caught.value)) < 400


def test_a_policy_that_looks_at_attention_is_refused_where_none_is_observed() -> None:
    for name in ("random", "streaming_llm", "knorm", "keydiff"):
        check(name, "none")
    for name in ("h2o", "scissorhands", "snapkv", "tova"):
        check(name, "last")
        with pytest.raises(ConfigError, match="observes none") as caught:
            check(name, "none")
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
    said = "slope=2.0 label=None low=1 high=5 Old tokens score high. [oldest_first:OldestFirst]"
    assert table()["oldest_first"] == f"positions {said}"
    check("oldest_first", slope=3, label=None, low=10, high=20)
    assert load_policy("oldest_first", '{"slope": 3}').slope == 3.0  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="policy_args.slope: must be of type float, got True"):
        check("oldest_first", slope=True)
    with pytest.raises(ConfigError, match="policy_args.label: must be of type str or NoneType"):
        check("oldest_first", label=2)
    with pytest.raises(ConfigError, match="policy_args.low: low must not be above high, got 6"):
        check("oldest_first", low=6, slope=1.0)


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
            check("broken", observes)
    assert table()["broken"].startswith("NOT USABLE: policy broken: ")
    assert table()["streaming_llm"].startswith("positions")
    load_policy("random")


@pytest.mark.parametrize("name", ["random", "none"])
def test_a_taken_name_is_refused(install: Install, name: str) -> None:
    install(**{name: "oldest_first:OldestFirst"})
    with pytest.raises(ConfigError, match="already taken"):
        policy_targets()


def test_a_policys_parameters_are_set_by_name() -> None:
    policy = load_policy("snapkv", '{"kernel": 3, "window": 32}')
    assert policy == SnapKV(window=32, kernel=3)
    assert load_policy("snapkv", '{"kernel": 3, "window": 32}') is policy
    assert load_policy("snapkv") == SnapKV()
    check("snapkv", window=1, kernel=127)


@pytest.mark.parametrize(
    ("policy", "arguments", "field", "said"),
    [
        ("snapkv", {"windows": 3}, "windows", "is not a parameter; there are: window, kernel"),
        ("h2o", {"window": 3}, "window", "is not a parameter; there are: none"),
        ("snapkv", {"window": 0}, "window", "window must be at least 1, got 0"),
        ("snapkv", {"kernel": 4, "window": 9}, "kernel", "must be an odd number from 1 to 127"),
        ("scissorhands", {"window": -1}, "window", "window must be at least 1, got -1"),
        ("snapkv", {"window": True}, "window", "must be of type int, got True"),
        ("snapkv", {"window": 1.0}, "window", "must be of type int, got 1.0"),
        ("snapkv", {"window": "x" * 100_000}, "window", "must be of type int, got 'xxx"),
        ("snapkv", {"n" * 100_000: 1}, "", "is not a parameter"),
    ],
)
def test_a_bad_argument_is_refused_as_the_user_spelled_it(
    policy: str, arguments: dict[str, object], field: str, said: str
) -> None:
    check("snapkv", window=1)  # 1 is cached; True and 1.0 are refused for all that
    with pytest.raises(ConfigError) as caught:
        check(policy, **arguments)
    assert caught.value.field.startswith(f"vtoken.policy_args.{field}")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500
