"""The configuration: every rule refused with field, rule and value; nothing lost on its way."""

from __future__ import annotations

import argparse
import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.bad_options import BAD_VALUES, refused
from vtoken_sglang.errors import shown
from vtoken_sglang.option_flags import add_flags, from_namespace, split_arguments
from vtoken_sglang.option_values import Switch
from vtoken_sglang.options import (
    ENVIRONMENT_VARIABLE,
    OPTIONS,
    RequestOptions,
    VTokenConfig,
    from_environment,
    to_environment,
)

PRUNING = VTokenConfig(policy="streaming_llm", budget=256)


def parse(line: str) -> VTokenConfig | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return from_namespace(parser.parse_args(line.split()))


# --- fields and cross rules ---------------------------------------------------------------------


def test_an_option_is_a_field_and_a_request_has_those_it_may_override() -> None:
    assert list(OPTIONS) == [field.name for field in fields(VTokenConfig)]
    overridable = {name for name, option in OPTIONS.items() if option.per_request}
    assert overridable == {field.name for field in fields(RequestOptions)}
    assert {"policy", "keep", "recent", "policy_args"} <= overridable
    assert not overridable & {"check", "trace", "ablation", "observe_layers"}


def test_the_object_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        PRUNING.sink = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "arm"),
    [
        ({}, "hook-only"),
        ({"ablation": "native"}, "native"),
        ({"policy": "random", "keep": 0.5}, "reclaim"),
        ({"policy": "random", "keep": 0.5, "ablation": "naive"}, "naive"),
    ],
)
def test_arm_follows_from_policy_and_ablation(values: dict[str, Any], arm: str) -> None:
    config = VTokenConfig(**values)
    assert config.arm == arm
    assert config.prunes is (arm in ("naive", "reclaim"))
    assert config.reclaims is (arm == "reclaim")


@pytest.mark.parametrize(
    ("ablation", "parts"),
    [
        ("", ("async", "relieve", "expected")),
        ("sync-copy", ("sync", "relieve", "expected")),
        ("retract", ("async", "retract", "expected")),
        ("full-admission,retract", ("async", "retract", "full")),
    ],
)
def test_an_ablation_switches_parts_off(ablation: str, parts: tuple[str, ...]) -> None:
    config = VTokenConfig(policy="random", keep=0.5, ablation=ablation)
    assert (config.copy, config.shortage, config.admission) == parts
    assert config.reclaims


SERVER_ONLY_BAD_VALUES: list[tuple[str, object, str]] = [
    ("repack_threshold", -0.1, "at least 0"),
    ("repack_threshold", 1.5, "at most 1"),
    ("repack_threshold", math.nan, "at least 0"),
    ("check", 1, "type bool"),
    ("ablation", "stock", "of native, naive, sync-copy"),
    ("ablation", "retract,retract", "each once"),
    ("ablation", "retract,", "each once"),
    ("ablation", None, "type str"),
]


@pytest.mark.parametrize(("name", "value", "rule"), BAD_VALUES + SERVER_ONLY_BAD_VALUES)
def test_a_bad_value_names_flag_rule_and_value(name: str, value: object, rule: str) -> None:
    good = {"policy": "random"} if name == "budget" else {"policy": "random", "budget": 64}
    error = refused(VTokenConfig, **(good | {name: value}))
    assert error.field == "--vtoken-" + name.replace("_", "-")
    assert rule in error.rule
    assert error.value is value or error.value == value
    assert str(error) == f"{error.field}: {error.rule}, got {shown(value)}"


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"policy": "random"}, "policy", "needs --vtoken-budget or --vtoken-keep"),
        ({"policy": "random", "budget": 9, "keep": 0.5}, "keep", "not both"),
        ({"budget": 9}, "budget", "other than none"),
        ({"keep": 0.5}, "keep", "other than none"),
        ({"policy_args": {"window": 3}}, "policy-args", "other than none"),
        ({"ablation": "naive"}, "ablation", "needs a --vtoken-policy"),
        ({"policy": "h2o", "keep": 0.5, "ablation": "native"}, "ablation", "--vtoken-policy none"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], field: str, rule: str) -> None:
    error = refused(VTokenConfig, **values)
    assert error.field == "--vtoken-" + field
    assert rule in error.rule


def test_a_budget_must_leave_room_for_sinks_recent_tokens_and_a_page() -> None:
    config = VTokenConfig(policy="random", budget=52, sink=4, recent=32)
    config.validate_for_page_size(16)
    error = refused(config.validate_for_page_size, 17)
    assert error.field == "--vtoken-budget"
    assert "= 53" in error.rule
    assert error.value == 52
    VTokenConfig(policy="random", keep=0.01).validate_for_page_size(64)
    assert "at least 1" in refused(config.validate_for_page_size, 0).rule
    half = VTokenConfig(policy="random", budget=52, sink=4, recent=0.5)  # 26 tokens
    half.validate_for_page_size(22)
    assert "= 53" in refused(half.validate_for_page_size, 23).rule


def test_a_share_of_recent_tokens_is_of_the_tokens_kept() -> None:
    assert [VTokenConfig(recent=0.29).recent_of(kept) for kept in (0, 3, 100)] == [0, 0, 29]
    assert VTokenConfig(recent=8).recent_of(100) == 8


# --- command line -------------------------------------------------------------------------------


def test_every_flag_is_read() -> None:
    config = parse(
        "--vtoken-policy random --vtoken-ablation naive,sync-copy --vtoken-keep 0.3 "
        "--vtoken-sink 1 --vtoken-recent 2 --vtoken-interval 3 --vtoken-seed 5 "
        "--vtoken-shared skip --vtoken-publish never --vtoken-repack-threshold 0 --vtoken-check "
        '--vtoken-policy-args {"b":1.5,"a":"x"}'
    )
    assert config == VTokenConfig(
        policy="random",
        policy_args={"a": "x", "b": 1.5},  # type: ignore[arg-type]
        ablation="naive,sync-copy",
        keep=0.3,
        sink=1,
        recent=2,
        interval=3,
        seed=5,
        shared="skip",
        publish="never",
        repack_threshold=0.0,
        check=True,
    )
    assert parse("--vtoken-policy random --vtoken-budget 77 --vtoken-recent 0.5") == VTokenConfig(
        policy="random", budget=77, recent=0.5
    )


def test_without_the_policy_flag_the_product_is_off() -> None:
    assert parse("") is None
    assert parse("--vtoken-policy none") == VTokenConfig()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "policy"])
def test_any_other_flag_alone_is_an_error(name: str) -> None:
    words = {"ablation": "native", "shared": "mask", "publish": "never", "policy_args": "{}"}
    words |= {"reuse_prefix_scores": "on", "observe_layers": "last"}
    text = words.get(name, "1")
    flag = "--vtoken-" + name.replace("_", "-")
    error = refused(parse, flag if name == "check" else f"{flag} {text}")
    assert error.field == flag
    assert "needs --vtoken-policy" in error.rule


@pytest.mark.parametrize(
    ("line", "field", "rule"),
    [
        ("--vtoken-policy random --vtoken-keep half", "--vtoken-keep", "type float"),
        ("--vtoken-policy random --vtoken-budget 1e3", "--vtoken-budget", "type int"),
        ("--vtoken-policy random --vtoken-keep nan", "--vtoken-keep", "above 0"),
        ("--vtoken-policy none --vtoken-ablation x", "--vtoken-ablation", "of native, naive"),
        ("--vtoken-policy h2o --vtoken-keep 1 --vtoken-recent 1.5", "--vtoken-recent", "share"),
        ("--vtoken-policy h2o --vtoken-keep 1 --vtoken-recent x", "--vtoken-recent", "type int"),
        ("--vtoken-policy h2o --vtoken-policy-args {", "--vtoken-policy-args", "JSON object"),
        ("--vtoken-policy none --vtoken-observe-layers 4", "--vtoken-observe-layers", "every:K"),
        ("--vtoken-policy none --vtoken-observe-layers every:0", "--vtoken-observe-layers", "K"),
        ("--vtoken-policy none --vtoken-observe-every 0", "--vtoken-observe-every", "at least 1"),
    ],
)
def test_bad_text_is_refused_with_the_flag(line: str, field: str, rule: str) -> None:
    error = refused(parse, line)
    assert error.field == field
    assert rule in error.rule


def test_typed_values_of_another_parser_are_accepted() -> None:
    namespace = argparse.Namespace(vtoken_policy="random", vtoken_keep=0.5, vtoken_check=None)
    assert from_namespace(namespace) == VTokenConfig(policy="random", keep=0.5)


def test_split_arguments_leaves_the_rest_alone() -> None:
    line = "--model-path m --vtoken-policy=random --tp 2 --vtoken-budget 99 --page-size=16 tail"
    config, rest = split_arguments(line.split())
    assert config == VTokenConfig(policy="random", budget=99)
    assert rest == ["--model-path", "m", "--tp", "2", "--page-size=16", "tail"]
    assert split_arguments(["--model-path", "m"]) == (None, ["--model-path", "m"])


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("--vtoken-pol random --vtoken-keep 1", "--vtoken-pol"),
        ("--vtoken-colour=red --vtoken-policy none", "--vtoken-colour"),
        ("--vtoken-policy none --vtoken-budget", "--vtoken-budget"),
        ("--vtoken-policy none --vtoken-check=yes", "--vtoken-check"),
        ("--vtoken-keep 0.5", "--vtoken-keep"),
    ],
)
def test_split_arguments_refuses_what_it_does_not_know(line: str, field: str) -> None:
    assert refused(split_arguments, line.split()).field == field


def test_help_names_every_default() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for option in OPTIONS.values():
        assert (option.flag in text) == option.listed
        if option.listed and option.default not in (None, "", False):
            assert f"(default: {option.default})" in text
    assert not OPTIONS["ablation"].listed


# --- JSON and the environment -------------------------------------------------------------------


def scalars() -> st.SearchStrategy[object]:
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    return numbers | st.booleans() | st.none() | st.text()


def configs() -> st.SearchStrategy[VTokenConfig]:
    amount = st.one_of(
        st.fixed_dictionaries({"budget": st.integers(1, 2**31 - 1)}),
        st.fixed_dictionaries({"keep": st.floats(0.0, 1.0, exclude_min=True)}),
    )
    common = st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["random", "streaming_llm"]),
            "policy_args": st.dictionaries(st.text(), scalars(), max_size=3),
            "recent": st.one_of(
                st.integers(0, 2**31 - 1), st.floats(0, 1, exclude_min=True, exclude_max=True)
            ),
            "ablation": st.sampled_from(["", "naive", "retract,sync-copy"]),
            "seed": st.integers(0, 2**63 - 1),
            "repack_threshold": st.floats(0.0, 1.0),
            "check": st.booleans(),
        }
    )
    return st.tuples(common, amount).map(lambda parts: VTokenConfig(**(parts[0] | parts[1])))


@settings(deadline=None)
@given(configs())
def test_json_and_flags_lose_nothing(config: VTokenConfig) -> None:
    assert VTokenConfig.from_json(config.to_json()) == config
    arguments: list[str] = []
    for name, option in OPTIONS.items():
        value = getattr(config, name)
        if isinstance(option.kind, Switch):
            arguments += [option.flag] if value else []
        elif value is not None:
            arguments.append(f"{option.flag}={value}")
    assert split_arguments(arguments) == (config, [])


def test_environment_carries_the_config() -> None:
    environment: dict[str, str] = {}
    assert from_environment(environment) is None
    to_environment(PRUNING, environment)
    assert list(environment) == [ENVIRONMENT_VARIABLE]
    assert from_environment(environment) == PRUNING


@pytest.mark.parametrize(
    ("text", "field", "rule"),
    [
        ("", ENVIRONMENT_VARIABLE, "must be JSON"),
        ("{", ENVIRONMENT_VARIABLE, "must be JSON"),
        ("[]", ENVIRONMENT_VARIABLE, "JSON object"),
        ('{"polcy": "none"}', "--vtoken-polcy", "is not an option"),
        ('{"policy": "random", "keep": true}', "--vtoken-keep", "type float"),
        ('{"policy": "random", "keep": NaN}', "--vtoken-keep", "above 0"),
    ],
)
def test_bad_json_is_refused(text: str, field: str, rule: str) -> None:
    error = refused(from_environment, {ENVIRONMENT_VARIABLE: text})
    assert error.field == field
    assert rule in error.rule
