"""Settings: one declaration for flags and TOML, axes from the requests' own options, arms."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.arms import ablation_flags, groups_of, rotated
from vtoken_sglang_eval.errors import ConfigError
from vtoken_sglang_eval.options import ABLATIONS, Options, add_flags, given_flags, make_options
from vtoken_sglang_eval.studies import read_studies, shipped

from vtoken_sglang.option_flags import split_arguments
from vtoken_sglang.options import RequestOptions, VTokenConfig


def flags(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return given_flags(parser.parse_args(words))


def names(options: Options) -> list[list[str]]:
    return [[arm.name for arm in group.arms] for group in groups_of(options)]


def test_policies_shares_and_ways_are_axes_on_one_server() -> None:
    options = make_options(
        flags("--policies", "snapkv,tova,none", "--keep", "0.5,0.25", "--shared", "skip,auto")
    )
    (arms,) = names(options)
    assert arms[0] == "native"
    assert arms[1:4] == ["snapkv 0.5 skip", "snapkv 0.5 auto", "snapkv 0.25 skip"]
    assert len(arms) == 1 + 2 * 2 * 2


def test_mask_stands_beside_skip_and_auto_unless_told_otherwise() -> None:
    (arms,) = names(Options())
    assert arms == ["native", "snapkv 0.5 skip", "snapkv 0.5 mask", "snapkv 0.5 auto"]


def test_every_arm_is_one_that_a_server_accepts() -> None:
    options = make_options(
        flags("--policies", "h2o,random", "--budget", "128", "--publish", "never")
    )
    server, rest = split_arguments(ablation_flags(""))
    assert isinstance(server, VTokenConfig)
    assert rest == []
    for group in groups_of(options):
        for arm in group.arms:
            assert RequestOptions.resolve(server, arm.request).prunes is arm.prunes


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_an_ablation_has_a_server_of_its_own(ablation: str) -> None:
    first, second = groups_of(Options(ablations=(ablation,)))
    assert (first.key, second.key) == ("", ablation)
    assert all(arm.ablation == ablation for arm in second.arms)
    assert len({arm.name for group in (first, second) for arm in group.arms}) == 5
    if ablation != "stock":
        config, _ = split_arguments(ablation_flags(ablation))
        assert config is not None
        assert config.prunes is any(arm.prunes for arm in second.arms)


def test_servers_without_pruned_arms_can_be_all_there_is() -> None:
    assert names(Options(policies=(), ablations=("native", "hook-only"))) == [
        ["native"],
        ["hook-only"],
    ]


def test_several_urls_have_the_same_arms_each() -> None:
    options = Options(
        url=("http://a:1", "http://b:2"), policies=("tova",), axes={"shared": ["skip"]}
    )
    assert names(options) == [
        ["native @1", "tova 0.5 skip @1"],
        ["native @2", "tova 0.5 skip @2"],
    ]


def test_rotation_puts_another_first() -> None:
    assert rotated("abc", 4) == ["b", "c", "a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policies", "bogus"], "policies: must be among none, h2o.* got 'bogus'"),
        (["--keep", "1.5"], "keep: must be .*at most 1.0, got 1.5"),
        (["--keep", "half"], "keep: must be .*, got 'half'"),
        (["--shared", "copy"], "shared: must be .* skip, mask, cow, auto, got 'copy'"),
        (["--ablations", "fast"], "ablations: must be among stock, .* got 'fast'"),
        (["--repeats", "0"], "repeats: must be at least 1, got 0"),
        (["--time-scale", "0"], "time_scale: must be above 0, got 0.0"),
        (["--pool", "1000"], "pool: must be a multiple of page_size 16, got 1000"),
        (["--workload", "chess"], "workload: must be among multi_turn.* got 'chess'"),
        (["--as-is", "--workload", "agent"], "as_is: --as-is and --workload exclude each other"),
        (["--trace", "a", "--dataset", "b"], "trace: --trace excludes --dataset"),
        (["--url", "http://a", "--ablations", "naive"], "ablations: an ablation is a start-up"),
    ],
)
def test_a_bad_value_is_refused_by_field_rule_and_value(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_options(flags(*words))


def test_a_study_file_says_what_flags_say(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'repeats = 2\npolicies = ["tova"]\n[[study]]\nname = "a"\nkeep = 0.25\n'
        '[[study]]\nname = "b"\nrepeats = 4\nconcurrency = [2, 4]\n'
    )
    found = read_studies(str(path), flags("--pool", "4096"))
    assert list(found) == ["a", "b"]
    assert (found["a"].repeats, found["a"].axes["keep"], found["a"].pool) == (2, (0.25,), 4096)
    assert (found["b"].repeats, found["b"].concurrency) == (4, (2, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("repeats = ", "study: must be TOML"),
        ("[[study]]\nrepeats = 1", "name: every study needs a name of its own"),
        ('[[study]]\nname = "a"\n[[study]]\nname = "a"', "name: every study needs a name"),
        ('[[study]]\nname = "a"\nspeed = 1', "speed: is no setting of a study, got 1"),
        ('[[study]]\nname = "a"\nrepeats = "x"', "repeats: must be a whole number, got 'x'"),
    ],
)
def test_a_bad_study_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_studies(str(path), {})


def test_a_missing_study_names_those_that_ship() -> None:
    with pytest.raises(ConfigError, match="or one of .*sharing"):
        read_studies("nowhere", {})


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_study_can_be_read(name: str) -> None:
    found = read_studies(name, {})
    assert found
    for options in found.values():
        assert groups_of(options)
        pruned = [arm for group in groups_of(options) for arm in group.arms if arm.prunes]
        ways = {arm.request["shared"] for arm in pruned if not arm.ablation}
        assert "mask" in ways or "auto" not in ways or "skip" not in ways
