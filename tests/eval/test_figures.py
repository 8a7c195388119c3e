"""Figures files: several commands share one, provenance stays right, nothing larger is lost."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.figures import merge_figures, provenance_of, read_figures, write_figures
from vtoken_sglang_eval.serve_figures import serve_figures

from tests.eval.builders import record, result_of, run_of, three_arm_result


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


def test_serve_figures_of_a_result() -> None:
    result = three_arm_result()
    figures = serve_figures(result)
    assert figures["figures"]["hook_only_throughput_ratio"]["value"] == pytest.approx(2.0 / 2.2)
    assert figures["figures"]["hook_only_p95_ratio"]["value"] == pytest.approx(1.0)
    assert figures["settings"]["requests"] == 2
    assert figures["repeats"] == 2
    assert merge_figures(None, figures)["figures"].keys() == figures["figures"].keys()


def test_serve_figures_need_native_and_hook_only() -> None:
    runs = [run for run in three_arm_result()["runs"] if run["arm"] != "native"]
    with pytest.raises(FiguresError, match="needs the arms hook-only and native"):
        serve_figures(result_of(runs))


def test_serve_figures_are_refused_after_a_failed_request() -> None:
    result = copy.deepcopy(three_arm_result())
    result["runs"].append(run_of("native", 9, [record(error="HTTP 500")]))
    with pytest.raises(FiguresError, match="some requests failed"):
        serve_figures(result)
