"""Figures files: several commands share one, provenance stays right, nothing larger is lost."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.figures import merge_figures, provenance_of, read_figures, write_figures
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.studies import read_toml, shipped
from vtoken_sglang_eval.study_figures import figures_of, write_declared
from vtoken_sglang_eval.table import runs_table

from tests.eval.builders import study
from vtoken_sglang.errors import VTokenError


def document(command: str, names: list[str], repeats: int = 3, **changes: Any) -> dict[str, Any]:
    base = {
        "topic": "serve",
        "command": command,
        "commit": "abc",
        "device": "CPU",
        "versions": {"python": "3.11"},
        "settings": {"requests": 10},
        "repeats": repeats,
        "figures": {
            name: {"value": 1.0, "unit": "ratio", "spread": {"min": 0.9, "max": 1.1}}
            for name in names
        },
    }
    return {**base, **changes}


def test_figures_of_two_commands_keep_their_own_commands() -> None:
    bench = document("bench", ["decode_a", "decode_b"])
    merged = merge_figures(bench, document("eval", ["hook_only"]))
    assert set(merged["figures"]) == {"decode_a", "decode_b", "hook_only"}
    assert provenance_of(merged, "decode_a")["command"] == "bench"
    assert provenance_of(merged, "hook_only")["command"] == "eval"
    # What most figures share stands at the top and is not repeated.
    assert merged["command"] == "bench"
    assert "command" not in merged["figures"]["decode_a"]
    assert "device" not in merged["figures"]["hook_only"]


def test_merging_in_either_order_says_the_same() -> None:
    one, two = document("bench", ["a", "b"]), document("eval", ["c"], commit="def")
    left, right = merge_figures(one, two), merge_figures(two, one)
    for name in "abc":
        assert left["figures"][name]["value"] == right["figures"][name]["value"]
        assert provenance_of(left, name) == provenance_of(right, name)


def test_a_newer_measurement_replaces_an_equal_one_and_its_provenance() -> None:
    old = document("eval", ["a", "b"])
    new = document("eval", ["a"], commit="def")
    new["figures"]["a"]["value"] = 2.0
    merged = merge_figures(old, new)
    assert merged["figures"]["a"]["value"] == 2.0
    assert provenance_of(merged, "a")["commit"] == "def"
    assert provenance_of(merged, "b")["commit"] == "abc"


@pytest.mark.parametrize(
    "smaller",
    [{"repeats": 2}, {"settings": {"requests": 9}}, {"settings": {"requests": 9, "x": 1}}],
)
def test_a_smaller_measurement_replaces_nothing(smaller: dict[str, Any]) -> None:
    old = document("eval", ["a", "b"])
    new = document("eval", ["b", "c"], **smaller)
    with pytest.raises(FiguresError, match="b would be replaced by a smaller"):
        merge_figures(old, new)
    assert provenance_of(merge_figures(old, new, force=True), "b") == {
        key: new[key] for key in ("command", "commit", "device", "versions", "settings", "repeats")
    }


def test_a_smaller_measurement_may_add_figures() -> None:
    merged = merge_figures(document("eval", ["a"]), document("eval", ["b"], repeats=1))
    assert provenance_of(merged, "a")["repeats"] == 3
    assert provenance_of(merged, "b")["repeats"] == 1


@pytest.mark.parametrize("field", ["topic", "command", "commit", "settings", "figures"])
def test_a_missing_field_is_refused(field: str) -> None:
    new = document("eval", ["a"])
    del new[field]
    with pytest.raises(FiguresError, match=field):
        merge_figures(None, new)


def test_another_topic_is_refused() -> None:
    with pytest.raises(FiguresError, match="'core' into a file of 'serve'"):
        merge_figures(document("eval", ["a"]), document("eval", ["a"], topic="core"))


def test_the_file_is_merged_and_unchanged_after_a_refusal(tmp_path: Path) -> None:
    path = tmp_path / "results" / "serve.json"
    write_figures(path, document("bench", ["a"]))
    written = write_figures(path, document("eval", ["b"]))
    assert read_figures(path) == written == json.loads(path.read_text())
    before = path.read_text()
    with pytest.raises(FiguresError):
        write_figures(path, document("eval", ["b"], repeats=1))
    assert path.read_text() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["serve.json"]


def test_writing_twice_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    new = document("eval", ["a", "b"])
    new["figures"]["a"]["value"] = 0.123456789
    write_figures(path, new)
    before = path.read_text()
    write_figures(path, new)
    assert path.read_text() == before


@pytest.mark.parametrize("text", ["not json", "[]", '{"figures": 3}'])
def test_a_file_that_is_no_figures_file_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.json"
    path.write_text(text)
    with pytest.raises(FiguresError):
        write_figures(path, document("eval", ["a"]))
    assert path.read_text() == text


SPEED = {"native": (2.0, 4.0), "snapkv 0.5 mask": (1.0, 2.0), "snapkv 0.5 auto": (0.5, 1.0)}
DECLARED = """
[figures]
topic = "cow"
[[figures.figure]]
name = "ratio_{policy}_keep{keep}_{shared}"
metric = "tokens_per_s"
of = { shared = ["mask", "auto"] }
over = { policy = "none" }
[[figures.figure]]
name = "worst_auto"
metric = "tokens_per_s"
of = { shared = "mask" }
over = { shared = "auto" }
turned = true
least = true
[[figures.figure]]
name = "e2e_{arm}"
metric = "e2e_p95"
of = { policy = "none" }
"""


def declared(tmp_path: Path, text: str = DECLARED) -> str:
    path = tmp_path / "study.toml"
    path.write_text(text)
    return str(path)


def test_figures_are_what_a_study_declares(tmp_path: Path) -> None:
    into = tmp_path / "cow.json"
    found = write_declared(declared(tmp_path), [study(SPEED)], into, False)
    assert (found["topic"], found["repeats"], found["commit"]) == ("cow", 2, "0123-dirty")
    values = {name: entry["value"] for name, entry in found["figures"].items()}
    assert values.pop("e2e_native") > 0
    assert values == {
        "ratio_snapkv_keep50_mask": 2.0, "ratio_snapkv_keep50_auto": 4.0, "worst_auto": 2.0
    }  # fmt: skip
    assert read_figures(into) == found


def test_pairs_of_pruned_arms_agree_in_policy_and_amount(tmp_path: Path) -> None:
    options = Options(policies=("snapkv", "tova"), ablations=("naive",), axes={"shared": ["auto"]})
    seconds = {
        "native": (9.0,), "snapkv 0.5 auto": (1.0,), "tova 0.5 auto": (2.0,),
        "snapkv 0.5 mask naive": (4.0,), "tova 0.5 mask naive": (6.0,),
    }  # fmt: skip
    entry = {
        "name": "x_{policy}", "metric": "tokens_per_s", "of": {"ablation": ""},
        "over": {"ablation": "naive"},
    }  # fmt: skip
    found = figures_of(runs_table([study(seconds, options=options)]), entry)
    assert {name: one["value"] for name, one in found.items()} == {"x_snapkv": 4.0, "x_tova": 3.0}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"metric": "beauty"}, "metric must be among"),
        ({"of": {"colour": "red"}}, "columns are"),
        ({"sum": True}, "keys must be among"),
        ({"of": {"policy": "h2o"}}, "no run is meant by"),
    ],
)
def test_a_wrong_declaration_is_refused(change: dict[str, Any], error: str) -> None:
    entry = {"name": "x", "metric": "tokens_per_s", "of": {"policy": "none"}, **change}
    with pytest.raises(VTokenError, match=error):
        figures_of(runs_table([study(SPEED)]), entry)


def test_no_figures_of_failed_requests(tmp_path: Path) -> None:
    head, runs = study(SPEED)
    runs[0]["failed"] = 1
    with pytest.raises(FiguresError, match="1 requests failed"):
        write_declared(declared(tmp_path), [(head, runs)], tmp_path / "cow.json", False)


@pytest.mark.parametrize("name", [name for name in shipped() if "figures" in read_toml(name)])
def test_shipped_declarations_name_metrics_and_columns_that_are_there(name: str) -> None:
    runs = runs_table([study(SPEED)])
    for entry in read_toml(name)["figures"]["figure"]:
        with contextlib.suppress(FiguresError):  # none of the runs is of that study
            figures_of(runs, entry)
