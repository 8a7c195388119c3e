"""Messages of typed errors: name, rule, value, however long the value is."""

from __future__ import annotations

from vtoken_sglang.errors import LONGEST_VALUE, ConfigError


def test_a_message_names_field_rule_and_value() -> None:
    error = ConfigError("--vtoken-keep", "must be above 0", -1)
    assert str(error) == "--vtoken-keep: must be above 0, got -1"


def test_a_long_value_is_cut_and_its_length_told() -> None:
    error = ConfigError("field", "must be short", "x" * 5000)
    assert error.value == "x" * 5000
    assert len(str(error)) < LONGEST_VALUE + 80
    assert str(error).endswith("... (5002 characters)")
