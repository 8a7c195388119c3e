"""Arms are data; their order rotates; engine flags are the same for all."""

from __future__ import annotations

import sys

import pytest
from vtoken_sglang_eval.arms import ARMS, rotated, select_arms
from vtoken_sglang_eval.config import EvalConfig
from vtoken_sglang_eval.errors import ConfigError
from vtoken_sglang_eval.run import engine_args, server_environment

CPU = EvalConfig(
    model="tiny", device="cpu", dtype="float32", server_args=("--disable-radix-cache",)
)


def test_every_arm_is_complete() -> None:
    for name, arm in ARMS.items():
        assert arm.name == name
        assert arm.summary.endswith(".")
        assert arm.reference is None or arm.reference in ARMS
        assert arm.reference != name


def test_references_end_somewhere() -> None:
    for arm in ARMS.values():
        seen = {arm.name}
        while arm.reference is not None:
            arm = ARMS[arm.reference]
            assert arm.name not in seen
            seen.add(arm.name)


def test_overhead_of_hook_only_is_measured_against_native() -> None:
    assert ARMS["hook-only"].reference == "native"


def test_stock_is_started_by_the_engine_itself_with_no_option_of_ours() -> None:
    words = ARMS["stock"].command(engine_args(CPU, 1234))
    assert words[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert not [word for word in words if "vtoken" in word]


def test_arms_differ_only_in_launcher_and_own_flags() -> None:
    common = engine_args(CPU, 1234)
    for arm in ARMS.values():
        words = arm.command(common)
        assert words[len(arm.launcher()) :] == [*common, *(arm.vtoken_args or ())]
    assert ARMS["native"].command([])[-4:] == [
        "--vtoken-policy",
        "none",
        "--vtoken-ablation",
        "native",
    ]


def test_engine_flags_on_a_cpu_and_elsewhere() -> None:
    words = engine_args(CPU, 1234)
    assert words[words.index("--port") + 1] == "1234"
    assert "--sleep-on-idle" in words
    assert words[-1] == "--disable-radix-cache"
    assert server_environment(CPU)["OMP_NUM_THREADS"] == "1"
    gpu = EvalConfig(model="tiny", device="cuda", dtype="bfloat16")
    assert "--sleep-on-idle" not in engine_args(gpu, 1234)
    assert "OMP_NUM_THREADS" not in server_environment(gpu)


def test_selection() -> None:
    assert [arm.name for arm in select_arms(["native", "stock"])] == ["native", "stock"]
    with pytest.raises(ConfigError, match="must be among"):
        select_arms(["nonsense"])
    with pytest.raises(ConfigError, match="once"):
        select_arms(["stock", "stock"])
    with pytest.raises(ConfigError, match="at least one"):
        select_arms([])


def test_every_arm_comes_first_equally_often() -> None:
    arms = select_arms(["stock", "native", "hook-only"])
    orders = [[arm.name for arm in rotated(arms, repeat)] for repeat in range(3)]
    assert sorted(order[0] for order in orders) == sorted(arm.name for arm in arms)
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert [arm.name for arm in rotated(arms, 3)] == orders[0]
