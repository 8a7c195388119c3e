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
from vtoken_sglang.options import (
    ENVIRONMENT_VARIABLE,
    REQUEST_FIELDS,
    RequestOptions,
    VTokenConfig,
    add_flags,
    flag_specs,
    from_environment,
    from_namespace,
    split_arguments,
    to_environment,
)

PRUNING = VTokenConfig(policy="streaming_llm", budget=256)


def parse(line: str) -> VTokenConfig | None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return from_namespace(parser.parse_args(line.split()))


# --- fields and cross rules ---------------------------------------------------------------------


def test_flags_and_fields_are_the_same_set() -> None:
    assert [spec.name for spec in flag_specs()] == [field.name for field in fields(VTokenConfig)]
    assert {field.name for field in fields(RequestOptions)} == set(REQUEST_FIELDS)
    assert all(spec.help for spec in flag_specs())


def test_the_object_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        PRUNING.sink = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "arm"),
    [
        ({}, "hook-only"),
        ({"arm": "native"}, "native"),
        ({"policy": "random", "keep": 0.5}, "reclaim"),
        ({"policy": "random", "keep": 0.5, "arm": "naive"}, "naive"),
    ],
)
def test_arm_follows_the_policy(values: dict[str, Any], arm: str) -> None:
    config = VTokenConfig(**values)
    assert config.arm == arm
    assert config.prunes is (arm in ("naive", "reclaim"))
    assert config.reclaims is (arm == "reclaim")


SERVER_ONLY_BAD_VALUES: list[tuple[str, object, str]] = [
    ("copy", "later", "one of async, sync"),
    ("repack_threshold", -0.1, "at least 0"),
    ("repack_threshold", 1.5, "at most 1"),
    ("repack_threshold", math.nan, "at least 0"),
    ("check", 1, "type bool"),
    ("arm", "stock", "one of native, hook-only, naive, reclaim"),
    ("arm", None, "type str"),
]


@pytest.mark.parametrize(("name", "value", "rule"), BAD_VALUES + SERVER_ONLY_BAD_VALUES)
def test_a_bad_value_names_flag_rule_and_value(name: str, value: object, rule: str) -> None:
    good = {"policy": "random"} if name == "budget" else {"policy": "random", "budget": 64}
    error = refused(VTokenConfig, **(good | {name: value}))
    assert error.field == "--vtoken-" + name.replace("_", "-")
    assert rule in error.rule
    assert error.value is value or error.value == value
    assert str(error) == f"{error.field}: {error.rule}, got {value!r}"


@pytest.mark.parametrize(
    ("values", "field", "rule"),
    [
        ({"policy": "random"}, "policy", "needs --vtoken-budget or --vtoken-keep"),
        ({"policy": "random", "budget": 9, "keep": 0.5}, "keep", "not both"),
        ({"budget": 9}, "budget", "other than none"),
        ({"keep": 0.5}, "keep", "other than none"),
        ({"arm": "naive"}, "arm", "needs a --vtoken-policy"),
        ({"arm": "reclaim"}, "arm", "needs a --vtoken-policy"),
        ({"policy": "random", "keep": 0.5, "arm": "native"}, "arm", "--vtoken-policy none"),
        ({"policy": "random", "keep": 0.5, "arm": "hook-only"}, "arm", "--vtoken-policy none"),
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


# --- command line -------------------------------------------------------------------------------


def test_every_flag_is_read() -> None:
    config = parse(
        "--vtoken-policy random --vtoken-arm naive --vtoken-keep 0.3 --vtoken-sink 1 "
        "--vtoken-recent 2 --vtoken-interval 3 --vtoken-seed 5 --vtoken-shared skip "
        "--vtoken-publish never --vtoken-copy sync --vtoken-repack-threshold 0 --vtoken-check "
        "--vtoken-page-mode dense"
    )
    assert config == VTokenConfig(
        policy="random",
        arm="naive",
        keep=0.3,
        sink=1,
        recent=2,
        interval=3,
        seed=5,
        shared="skip",
        publish="never",
        copy="sync",
        repack_threshold=0.0,
        page_mode="dense",
        check=True,
    )
    assert parse("--vtoken-policy random --vtoken-budget 77") == VTokenConfig(
        policy="random", budget=77
    )


def test_without_the_policy_flag_the_product_is_off() -> None:
    assert parse("") is None
    assert parse("--vtoken-policy none") == VTokenConfig()


@pytest.mark.parametrize("name", [spec.name for spec in flag_specs() if spec.name != "policy"])
def test_any_other_flag_alone_is_an_error(name: str) -> None:
    words = {"arm": "native", "shared": "mask", "publish": "never", "copy": "sync"}
    words |= {"reuse_prefix_scores": "on", "observe_layers": "last"}
    words |= {"admission": "full", "shortage": "retract", "page_mode": "dense"}
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
        ("--vtoken-policy none --vtoken-arm stock", "--vtoken-arm", "one of native"),
        ("--vtoken-policy h3o --vtoken-keep 1", "--vtoken-policy", "installed policy"),
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
    for spec in flag_specs():
        assert spec.flag in text
        if spec.default not in (None, "", False):
            assert f"(default: {spec.default})" in text


# --- JSON and the environment -------------------------------------------------------------------


def configs() -> st.SearchStrategy[VTokenConfig]:
    amount = st.one_of(
        st.fixed_dictionaries({"budget": st.integers(1, 2**31 - 1)}),
        st.fixed_dictionaries({"keep": st.floats(0.0, 1.0, exclude_min=True)}),
    )
    common = st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["random", "streaming_llm"]),
            "arm": st.sampled_from(["naive", "reclaim"]),
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
    for spec in flag_specs():
        value = getattr(config, spec.name)
        if spec.kind is bool:
            arguments += [spec.flag] if value else []
        elif value is not None:
            arguments.append(f"{spec.flag}={value}")
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
