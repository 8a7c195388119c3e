"""Settings: presets, files and flags in that order; wrong values by field, rule and value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.config import CONFIGS, EvalConfig, make_config, read_config_file
from vtoken_sglang_eval.errors import ConfigError
from vtoken_sglang_eval.estimate import estimate, minutes
from vtoken_sglang_eval.grid import is_grid
from vtoken_sglang_eval.main import config_of, main, parser
from vtoken_sglang_eval.workload import Session, Workload


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repeats", 0),
        ("page_size", -1),
        ("turns", 1.5),
        ("concurrency", True),
        ("seed", -1),
        ("port", 70000),
        ("device", "tpu"),
        ("arms", ("nonsense",)),
        ("arms", ()),
        ("arms", "native"),
        ("server_args", ["--flag", 1]),
        ("dataset", 5),
        ("workload", 5),
        ("dtype", None),
        ("policy", ["random"]),
        ("startup_timeout", 0),
        ("pool", 1000),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        EvalConfig(model="tiny", **{field: value})


def test_flags_win_over_a_file_and_a_file_over_the_preset(tmp_path: Path) -> None:
    path = tmp_path / "large.toml"
    path.write_text('repeats = 7\nturns = 2\narms = ["stock", "native"]\n')
    options = parser().parse_args(["run", "--config", str(path), "--turns", "3"])
    config = config_of(options)
    assert (config.repeats, config.turns, config.arms) == (7, 3, ("stock", "native"))
    assert config.preset == "large"
    assert config.seed == EvalConfig().seed


def test_quick_has_its_own_defaults() -> None:
    config = config_of(parser().parse_args(["quick", "--arms", "native,hook-only"]))
    assert config.preset == "quick"
    assert config.arms == ("native", "hook-only")
    assert config == make_config("quick", {}, {"arms": ("native", "hook-only")})


@pytest.mark.parametrize(
    ("text", "match"), [("nonsense = 1", "got 'nonsense'"), ("= 3", "must be TOML")]
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_config_file(str(path))


def test_shipped_configurations_are_found_by_name() -> None:
    for file in CONFIGS.glob("*.toml"):
        if is_grid(str(file)):
            continue
        config = make_config("run", read_config_file(file.stem), {})
        assert config.preset == file.stem
    serve = make_config("run", read_config_file("serve"), {})
    assert {"native", "hook-only"} <= set(serve.arms)


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="readable TOML file"):
        read_config_file("nowhere.toml")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "--arms", "nonsense"], "arms: must be among"),
        (["run", "--repeats", "0"], "repeats: must be"),
        (["run", "--model", "./nowhere"], "model: must be an existing folder"),
        (["run", "--config", "nowhere.toml"], "config: must name"),
        (["report", "nowhere.json"], "nowhere.json: No such file"),
    ],
)
def test_main_answers_one_line_and_status_2(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_estimate_adds_starts_prefill_and_decode() -> None:
    session = Session(
        session=0, lane=0, first_prompt=(1,) * 90, later_turns=((2,) * 10,), answer_tokens=(5, 5)
    )
    config = EvalConfig(model="tiny", repeats=2, arms=("stock", "native"))
    found = estimate(
        config,
        Workload(name="test", sessions=(session,)),
        "cpu",
        weight_bytes=2_000_000,
        rates=(1e9, 1e9),
    )
    # 1e6 parameters: 2e8 operations and 10 steps of 4e6 bytes, both at half the rate.
    assert found.run_s == pytest.approx(0.4 + 10 * (0.008 + 0.02))
    assert found.servers == 4
    assert found.total_s == pytest.approx(4 * (found.start_s + found.run_s))
    assert "4 server starts" in found.text()
    there = estimate(config, Workload(name="test", sessions=(session,)), "cuda", 2_000_000)
    assert "the requests come on top" in there.text()


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (59.6, "1 min 00 s"), (425, "7 min 05 s")]
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert minutes(seconds) == text
