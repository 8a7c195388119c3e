"""The README names every command, flag and request option there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vtoken_sglang.cli import COMMANDS
from vtoken_sglang.option_specs import ARMS, SPECS, FlagSpec

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
FLAG_ROWS = dict(
    re.findall(r"^\| `(--vtoken-[a-z-]+)[^|]*\| *([^|]*?) *\|", README, flags=re.MULTILINE)
)


def test_flags() -> None:
    assert set(FLAG_ROWS) == {spec.flag for spec in SPECS.values()}
    assert set(re.findall(r"--vtoken-[a-z-]+", README)) <= set(FLAG_ROWS)


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_default(spec: FlagSpec) -> None:
    if spec.name == "policy" or spec.default is None:
        default = ""
    elif spec.default is False:
        default = "off"
    else:
        default = str(spec.default) or "derived"
    assert FLAG_ROWS[spec.flag].strip("`") == default


def test_choices() -> None:
    for spec in SPECS.values():
        missing = [choice for choice in spec.choices if f"`{choice}`" not in README]
        assert missing == [], spec.flag


def test_request_options() -> None:
    (sentence,) = re.findall(
        r"^((?:`[a-z_]+`(?:,| and)\s)+`[a-z_]+`) may be set per request", README, re.MULTILINE
    )
    said = set(re.findall(r"`([a-z_]+)`", sentence))
    assert said == {name for name, spec in SPECS.items() if spec.per_request}


def test_commands_and_arms() -> None:
    assert set(re.findall(r"^\| `vtoken-sglang ([a-z]+)", README, re.MULTILINE)) == set(COMMANDS)
    table = README.partition("### Arms")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == {*ARMS, "stock"}
