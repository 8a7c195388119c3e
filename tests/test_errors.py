"""Messages of typed errors: name, rule, value on one short line, however deep or long the value."""

from __future__ import annotations

from typing import Any

import pytest

from vtoken_sglang.errors import MAX_SHOWN, ConfigError, shortened, shown


def nested(depth: int, kind: type) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value} if kind is dict else [value]
    return value


class Mute:
    def __repr__(self) -> str:
        raise LookupError("no words")


def test_a_message_names_field_rule_and_value() -> None:
    error = ConfigError("--vtoken-keep", "must be above 0", -1)
    assert str(error) == "--vtoken-keep: must be above 0, got -1"


def test_short_values_are_shown_as_they_are() -> None:
    for value in (None, True, 0.5, "it's", ["a", 1], {"b": {"c": 2}}, ()):
        assert shown(value) == repr(value)


@pytest.mark.parametrize("kind", [list, dict])
@pytest.mark.parametrize("depth", [10, 1_000, 100_000])
def test_depth_is_cut(kind: type, depth: int) -> None:
    text = shown(nested(depth, kind))
    assert "..." in text
    assert len(text) < 40


@pytest.mark.parametrize(
    "value",
    [
        "x" * 1_000_000,
        "\n" * 1_000_000,
        10**10_000,
        list(range(100_000)),
        {str(number): number for number in range(100_000)},
        [["y" * 1000] * 1000] * 1000,
        Mute(),
        type("Long", (), {"__repr__": lambda _: "z\n" * 10_000})(),
    ],
    ids=["text", "lines", "digits", "list", "dict", "lists", "mute", "words"],
)
def test_any_value_makes_one_short_line(value: object) -> None:
    error = ConfigError("field", "must be short", value)
    assert error.value is value
    assert len(str(error)) <= MAX_SHOWN + 30
    assert str(error).isprintable()


@pytest.mark.parametrize("name", ["o" * 1_000_000, "a\nb", "\ud800", "\u200b" * 500])
def test_names_are_shortened_like_values(name: str) -> None:
    assert len(shortened(name)) <= MAX_SHOWN
    assert shortened(name).isprintable()
    assert len(str(ConfigError(f"vtoken.{name}", "is not an option", 1))) <= MAX_SHOWN + 30
    assert shortened("keep") == "keep"
