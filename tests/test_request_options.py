"""What a request may override, and how a bad override is refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from tests.helpers.bad_options import BAD_VALUES, refused
from vtoken_sglang.options import REQUEST_FIELDS, RequestOptions, VTokenConfig

PRUNING = VTokenConfig(policy="streaming_llm", budget=256)


def test_no_override_gives_the_servers_defaults() -> None:
    expected = {name: value for name, value in asdict(PRUNING).items() if name in REQUEST_FIELDS}
    assert asdict(RequestOptions.resolve(PRUNING, None)) == expected
    assert asdict(RequestOptions.resolve(PRUNING, {})) == expected
    off = RequestOptions.resolve(VTokenConfig(), None)
    assert not off.prunes
    assert (off.budget, off.keep) == (None, None)


def test_an_override_replaces_only_what_it_names() -> None:
    options = RequestOptions.resolve(PRUNING, {"policy": "random", "seed": 7, "shared": "skip"})
    assert (options.policy, options.budget, options.seed) == ("random", 256, 7)
    assert (options.shared, options.recent) == ("skip", PRUNING.recent)


def test_a_requests_budget_and_keep_replace_each_other() -> None:
    options = RequestOptions.resolve(PRUNING, {"keep": 1})
    assert (options.budget, options.keep) == (None, 1.0)
    assert type(options.keep) is float
    options = RequestOptions.resolve(VTokenConfig(policy="random", keep=0.5), {"budget": 90})
    assert (options.budget, options.keep) == (90, None)
    error = refused(RequestOptions.resolve, PRUNING, {"budget": 90, "keep": 0.5})
    assert error.field == "vtoken.keep"
    assert error.rule == "give vtoken.budget or vtoken.keep, not both"


def test_a_request_may_switch_pruning_off() -> None:
    options = RequestOptions.resolve(PRUNING, {"policy": "none"})
    assert not options.prunes
    assert (options.budget, options.keep) == (None, None)
    error = refused(RequestOptions.resolve, PRUNING, {"policy": "none", "keep": 0.5})
    assert error.field == "vtoken.keep"


@pytest.mark.parametrize(("name", "value", "rule"), BAD_VALUES)
def test_a_bad_request_value_names_field_rule_and_value(
    name: str, value: object, rule: str
) -> None:
    error = refused(RequestOptions.resolve, PRUNING, {name: value})
    assert error.field == "vtoken." + name
    assert rule in error.rule
    assert error.value is value or error.value == value


@pytest.mark.parametrize("name", ["budget", "keep"])
def test_null_is_not_a_number(name: str) -> None:
    error = refused(RequestOptions.resolve, PRUNING, {name: None})
    assert (error.field, error.value) == (f"vtoken.{name}", None)


@pytest.mark.parametrize("raw", [[], "none", 3, True, ["policy", "none"]])
def test_what_is_no_object_is_refused(raw: object) -> None:
    error = refused(RequestOptions.resolve, PRUNING, raw)
    assert error.field == "vtoken"
    assert error.value == raw


@pytest.mark.parametrize("name", ["kepe", "ablation", "arm", "repack_threshold", "check", "Policy"])
def test_unknown_and_server_only_fields_are_refused(name: str) -> None:
    error = refused(RequestOptions.resolve, PRUNING, {name: "x"})
    assert error.field == "vtoken." + name
    assert "options are policy, policy_args, budget, keep" in error.rule
    assert error.value == "x"


@pytest.mark.parametrize("arm", ["native", "hook-only"])
@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"policy": "random", "keep": 0.5}, "policy"),
        ({"keep": 0.5}, "keep"),
        ({"budget": 9}, "budget"),
    ],
)
def test_a_server_that_prunes_nothing_says_so(arm: str, raw: dict[str, Any], field: str) -> None:
    config = VTokenConfig(ablation="native" if arm == "native" else "")
    error = refused(RequestOptions.resolve, config, raw)
    assert error.field == "vtoken." + field
    assert f"arm {arm}" in error.rule
    assert not RequestOptions.resolve(config, {"policy": "none"}).prunes
    assert not RequestOptions.resolve(config, {"sink": 2}).prunes


def test_a_requests_budget_is_checked_against_the_page_size() -> None:
    RequestOptions.resolve(PRUNING, {"budget": 52}, page_size=16)
    error = refused(RequestOptions.resolve, PRUNING, {"budget": 51}, page_size=16)
    assert error.field == "vtoken.budget"
    assert "vtoken.sink + vtoken.recent + one page (16 tokens) = 52" in error.rule
    # Raising what is protected breaks the server's own budget just as well.
    error = refused(RequestOptions.resolve, PRUNING, {"recent": 250}, page_size=16)
    assert (error.field, error.value) == ("vtoken.budget", 256)


def test_a_requests_share_of_recent_tokens_is_of_its_own_budget() -> None:
    options = RequestOptions.resolve(PRUNING, {"budget": 90, "recent": 0.5}, page_size=16)
    assert options.recent_of(90) == 45
    error = refused(RequestOptions.resolve, PRUNING, {"budget": 90, "recent": 0.9}, page_size=16)
    assert "= 101" in error.rule  # 4 + 81 + 16


def test_policy_arguments_are_the_servers_unless_the_policy_is_another() -> None:
    server = VTokenConfig(policy="snapkv", keep=0.5, policy_args='{"window": 8}')
    assert RequestOptions.resolve(server, {"keep": 0.2}).policy_args == '{"window": 8}'
    assert RequestOptions.resolve(server, {"policy": "snapkv"}).policy_args == '{"window": 8}'
    assert RequestOptions.resolve(server, {"policy": "tova"}).policy_args == "{}"
    assert RequestOptions.resolve(server, {"policy": "none"}).policy_args == "{}"
    options = RequestOptions.resolve(server, {"policy_args": {"window": 3, "kernel": 1}})
    assert options.policy_args == '{"kernel": 1, "window": 3}'
    assert hash(options) == hash(
        RequestOptions.resolve(server, {"policy_args": options.policy_args})
    )
    error = refused(RequestOptions.resolve, PRUNING, {"policy": "none", "policy_args": {"a": 1}})
    assert error.field == "vtoken.policy_args"


def test_policy_arguments_that_are_equal_numbers_stay_apart() -> None:
    given = [1, 1.0, True]
    held = [RequestOptions.resolve(PRUNING, {"policy_args": {"a": one}}) for one in given]
    assert len({options.policy_args for options in held}) == 3


NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]


HOSTILE: dict[str, Any] = {
    "list": NESTED,
    "object": {"a": NESTED},
    "text": "x" * 1_000_000,
    "lines": "a\nb",
    "digits": 10**5000,
    "name": {"n" * 100_000: NESTED},
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", [*REQUEST_FIELDS, "unknown", "window"])
def test_whatever_is_sent_comes_back_as_one_short_line(name: str, kind: str) -> None:
    raw: dict[str, Any] = {name: HOSTILE[kind]}
    if name == "window":
        raw = {"policy_args": {"window": [HOSTILE[kind]]}}
    if name == "policy" and kind in ("text", "lines"):
        raw = {"policy": [HOSTILE[kind]]}  # a text may be a policy's name: policy.registry asks
    error = refused(RequestOptions.resolve, PRUNING, raw)
    assert len(str(error)) < 600
    assert str(error).isprintable()


@pytest.mark.parametrize("name", ["n" * 1_000_000, "a\nb", 3])
def test_an_unknown_name_comes_back_shortened(name: object) -> None:
    error = refused(RequestOptions.resolve, PRUNING, {name: 1})
    assert error.field.startswith("vtoken.") or "vtoken.a" in error.field
    assert len(str(error)) < 600
    assert str(error).isprintable()


@pytest.mark.parametrize("raw", [NESTED, "x" * 1_000_000, [[NESTED] * 9] * 9])
def test_what_is_no_object_comes_back_shortened(raw: object) -> None:
    assert len(str(refused(RequestOptions.resolve, PRUNING, raw))) < 300
