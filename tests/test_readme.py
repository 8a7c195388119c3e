"""The README names every command, flag and request option there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vtoken_sglang.cli import COMMANDS
from vtoken_sglang.option_values import Option
from vtoken_sglang.options import ABLATIONS, ARMS, OPTIONS

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
FLAG_ROWS = dict(
    re.findall(r"^\| `(--vtoken-[a-z-]+)[^|]*\| *([^|]*?) *\|", README, flags=re.MULTILINE)
)


def test_flags() -> None:
    assert set(FLAG_ROWS) == {option.flag for option in OPTIONS.values() if option.listed}
    known = {option.flag for option in OPTIONS.values()}
    assert set(re.findall(r"--vtoken-[a-z-]+", README)) == known


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS.values() if option.listed], ids=lambda one: one.name
)
def test_default(option: Option) -> None:
    if option.name == "policy" or option.default is None:
        default = ""
    elif option.default is False:
        default = "off"
    else:
        default = str(option.default)
    assert FLAG_ROWS[option.flag].strip("`") == default


def test_choices() -> None:
    for option in OPTIONS.values():
        missing = [choice for choice in option.kind.choices if f"`{choice}`" not in README]
        assert missing == [], option.flag
    assert set(ABLATIONS) == set(OPTIONS["ablation"].kind.choices)


def test_request_options() -> None:
    (sentence,) = re.findall(
        r"^((?:`[a-z_]+`(?:,| and)\s)+`[a-z_]+`) may be set per request", README, re.MULTILINE
    )
    said = set(re.findall(r"`([a-z_]+)`", sentence))
    assert said == {name for name, option in OPTIONS.items() if option.per_request}


def test_commands_and_arms() -> None:
    assert set(re.findall(r"^\| `vtoken-sglang ([a-z]+)", README, re.MULTILINE)) == set(COMMANDS)
    table = README.partition("### Arms")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == {*ARMS, "stock"}
