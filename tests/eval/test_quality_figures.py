"""From raw rows to figures and tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vtoken_sglang_eval.errors import DatasetError, ResultsError
from vtoken_sglang_eval.markdown import fill
from vtoken_sglang_eval.quality import peer, perplexity, questions, seeds, served, tables
from vtoken_sglang_eval.quality.__main__ import main
from vtoken_sglang_eval.quality.cells import FULL, KEEPS, Cell, grid, policy_names
from vtoken_sglang_eval.quality.policy_lines import lines_figure, policy_lines
from vtoken_sglang_eval.quality.rows import Deadline, Rows, read_rows
from vtoken_sglang_eval.quality.ruler import read_tasks
from vtoken_sglang_eval.quality.tasks import Task

from tests.eval.test_quality_tasks import TOKENIZER


def test_cells_say_what_a_request_asks_for() -> None:
    assert FULL.name == "full"
    assert not FULL.options(16).prunes
    cell = Cell("random", 0.5)
    assert cell.name == "random_keep50"
    options = cell.options(64, seed=3)
    assert (options.policy, options.keep, options.interval, options.seed) == ("random", 0.5, 64, 3)
    names = [one.name for one in grid(policy_names())]
    assert len(set(names)) == len(names) == 1 + len(KEEPS) * len(policy_names())


def test_rows_resume_and_refuse_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "work" / "rows.jsonl"
    rows = Rows(path, {"seed": 0, "lengths": (1, 2)})
    rows.add("a", {"value": 1 / 3})
    again = Rows(path, {"seed": 0, "lengths": (1, 2)})
    assert again.found == rows.found == {"a": {"value": 0.3333333}}
    assert read_rows(path)[1] == again.found
    with pytest.raises(ResultsError, match="other settings \\(seed\\)"):
        Rows(path, {"seed": 1, "lengths": (1, 2)})
    path.write_text("nothing of the kind\n")
    with pytest.raises(ResultsError, match="not a file"):
        Rows(path, {})


def test_deadline() -> None:
    assert Deadline(0).passed
    assert not Deadline(None).passed
    assert not Deadline(60).passed


def test_perplexity_figures() -> None:
    rows = {
        "0": {"full": {"surprise": 1.0}, "h2o_keep50": {"surprise": 1.5}},
        "1": {"full": {"surprise": 3.0}, "h2o_keep50": {"surprise": 3.1}},
    }
    found = perplexity.figures(rows)
    assert found["perplexity_full"]["value"] == pytest.approx(math.exp(2))
    assert found["perplexity_ratio_h2o_keep50"]["value"] == pytest.approx(math.exp(0.3))
    assert found["perplexity_ratio_h2o_keep50"]["spread"]["max"] == pytest.approx(math.exp(0.5))
    assert "perplexity_ratio_full" not in found


def question_rows() -> dict[str, Any]:
    def result(score: float, answer: list[int], evicted: list[Any]) -> dict[str, Any]:
        return {"score": score, "answer": answer, "evicted": evicted}

    cells = {
        "full": result(1.0, [1, 2], []),
        "h2o_keep50": result(0.0, [3], [[40, [5, 6]], [56, [7]]]),
    }
    other = {"full": result(1.0, [1], []), "h2o_keep50": result(1.0, [1], [[30, [4]]])}
    return {
        "needle/a/after": {"kind": "needle", "placement": "after", "cells": cells},
        "needle/b/after": {"kind": "needle", "placement": "after", "cells": other},
    }


def test_question_figures() -> None:
    found = questions.figures(question_rows())
    assert set(found) == {"needle_after_full", "needle_after_h2o_keep50"}
    half = found["needle_after_h2o_keep50"]
    assert half["value"] == 0.5
    assert half["spread"]["count"] == 2
    assert 0 < half["spread"]["low"] < 0.5 < half["spread"]["high"] < 1


def served_row(cell: str, answer: list[int], evicted: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "question": "needle/a/after", "kind": "needle", "cell": cell, "answer": answer,
        "evicted": evicted, "score": 1.0, **more,
    }  # fmt: skip


def test_agreement_of_the_served_engine_with_the_reference() -> None:
    same = {
        "1": served_row("full", [1, 2], []),
        "2": served_row("h2o_keep50", [3], [[40, [5, 6]], [56, [9]]]),  # later looks do not count
    }
    found = served.disagreements(same, question_rows())
    assert (
        found["served_eviction_mismatches"]["value"]
        == found["served_answer_mismatches"]["value"]
        == 0
    )
    assert found["served_eviction_mismatches"]["spread"] == {"requests": 2, "tokens_evicted": 2}
    other = {"1": served_row("h2o_keep50", [4], [[40, [5, 8]]])}
    found = served.disagreements(other, question_rows())
    assert found["served_eviction_mismatches"]["value"] == 2
    assert found["served_answer_mismatches"]["value"] == 1
    elsewhere = {"1": served_row("h2o_keep50", [3], [[41, [5, 6]]])}
    assert (
        served.disagreements(elsewhere, question_rows())["served_eviction_mismatches"]["value"] == 4
    )
    never = {"1": served_row("h2o_keep50", [3], [])}
    assert served.disagreements(never, question_rows())["served_eviction_mismatches"]["value"] == 2
    unknown = {"1": served_row("full", [1], [], question="needle/z/after")}
    assert served.disagreements(unknown, question_rows()) == {}


def test_keeping_everything() -> None:
    rows = {
        "1": served_row("full", [1, 2], []),
        "2": served_row("h2o_keep100", [1, 2], []),
        "3": served_row("tova_keep100", [1, 3], []),
        "4": served_row("knorm_keep100", [1, 2], [[40, [5]]]),
    }
    figure = served.keep_all_figure(rows)["served_keep100_mismatches"]
    assert (figure["value"], figure["spread"]["requests"]) == (2, 3)
    assert set(served.by_question(rows)["needle/a/after"]["cells"]) == {"full"}


def needle() -> Task:
    return Task(
        kind="needle", name="n", context=[1, 2], question=[3, 4], answers=("7",), answer_tokens=4
    )


def peer_rows(items: list[dict[str, Any]]) -> dict[str, Any]:
    rows = {}
    for number, one in enumerate(items):
        for side, more in (("ours", 0.1 * number), ("kvpress", 0.0)):
            rows[f"{side}/{one['name']}"] = {
                policy: {"surprise": 2.0 + (more if policy != "none" else 0), "exact": number > 1}
                for policy in ("none", *peer.PRESSES)
            }
    return rows


def test_items_are_scored_where_they_should_be() -> None:
    text = list(range(perplexity.PROMPT + 5))
    first, second = peer.items_of([text], [needle()], TOKENIZER)
    assert first["context"] + first["tail"] == text
    assert first["scored_from"] == 1
    assert second["tail"][: second["scored_from"]] == [3, 4]
    assert TOKENIZER.decode(second["tail"][second["scored_from"] :]) == " 7"


def test_peer_figures() -> None:
    text = list(range(perplexity.PROMPT + 5))
    items = peer.items_of([text, text], [needle()], TOKENIZER)
    found = peer.figures(peer_rows(items), items)
    gap = found["kvpress_gap_h2o_keep50"]
    assert gap["value"] == pytest.approx(0.05)
    assert gap["spread"]["standard_error"] == pytest.approx(0.05)
    assert found["kvpress_gap_full"]["value"] == 0.0
    assert found["once_needle_ours_h2o_keep50"]["value"] == 1.0
    assert found["once_perplexity_kvpress_tova_keep50"]["value"] == pytest.approx(math.exp(2))
    assert peer.gap_figure(np.array([0.5]))["spread"]["standard_error"] is None


def test_a_peer_that_does_not_start_or_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [{"name": "text_0", "context": [1], "tail": [2, 3], "scored_from": 1}]
    rows = Rows(tmp_path / "rows.jsonl", {})
    with pytest.raises(peer.PeerError, match="--kvpress-python"):
        peer.measure_theirs(tmp_path / "none", "m", items, rows, Deadline(None))
    side = tmp_path / "side.py"
    monkeypatch.setattr(peer, "SIDE", side)
    python = Path(__import__("sys").executable)
    side.write_text("import sys; sys.stdin.read(); raise SystemExit(4)")
    with pytest.raises(peer.PeerError, match="exit status 4"):
        peer.measure_theirs(python, "m", items, rows, Deadline(None))
    side.write_text(
        "import json, sys\n"
        "for one in json.load(sys.stdin)['items']:\n"
        "    print(json.dumps({'name': one['name'], 'found': {}, 'versions': {'kvpress': 'x'}}))\n"
    )
    assert peer.measure_theirs(python, "m", items, rows, Deadline(None))
    assert set(rows.found) == {"kvpress/text_0", "kvpress/versions"}


def test_policy_files_are_under_fifty_lines() -> None:
    assert set(policy_lines()) == set(policy_names())
    figure = lines_figure()["max_policy_lines"]
    assert figure["value"] == max(figure["spread"].values())
    assert 0 < figure["value"] < 50


def test_ruler_samples_are_read(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="holds no"):
        read_tasks(tmp_path, TOKENIZER, 1)
    path = tmp_path / "vt" / "validation.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"input": "say a", "outputs": ["a", 7]}) + "\n")
    (task,) = read_tasks(tmp_path, TOKENIZER, 1)
    assert (TOKENIZER.decode(task.prompt), task.answers) == ("say a", ("a", "7"))
    assert questions.placements_of(task) == ("after",)
    with pytest.raises(DatasetError, match="1 samples, 2 are needed"):
        read_tasks(tmp_path, TOKENIZER, 2)
    path.write_text("{}\n")
    with pytest.raises(DatasetError, match="not as the generator"):
        read_tasks(tmp_path, TOKENIZER, 1)


def test_an_answer_of_ruler_has_room_whatever_its_length(tmp_path: Path) -> None:
    identifier = "0c2b1e1e-6b1f-4c4e-9d53-6a0e5d1f2b7a"
    path = tmp_path / "niah_single_3" / "validation.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"input": "say it", "outputs": [identifier]}) + "\n")
    (task,) = read_tasks(tmp_path, TOKENIZER, 1)
    assert task.answer_tokens > len(TOKENIZER.encode(f" {identifier}"))


@pytest.mark.parametrize("text", ["0", "-1", "two"])
def test_a_number_of_texts_is_at_least_one(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["perplexity", "--out", str(tmp_path / "f.json"), "--texts", text])
    assert "--texts: must be a whole number of at least 1" in capsys.readouterr().err


def test_a_missing_document_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "f.json"
    figures.write_text('{"figures": {}}')
    missing = str(tmp_path / "none.md")
    assert main(["tables", "--out", str(figures), "--doc", missing]) == 2
    assert f"error: --doc {missing}: No such file" in capsys.readouterr().err


def test_seeds_count_the_requests_that_hit_the_cache() -> None:
    asked = [{"score": 0.0, "cached": 0}, {"score": 1.0, "cached": 64}, {"score": 0.0, "cached": 9}]
    rows = {
        "0": {"cell": "h2o_keep50", "switch": "on", "questions": asked},
        "1": {"cell": "h2o_keep50", "switch": "off", "questions": asked[:1]},
    }
    found = seeds.figures(rows)
    assert set(found) == {"reuse_prefix_scores_on_recall_h2o_keep50"}
    assert found["reuse_prefix_scores_on_recall_h2o_keep50"]["value"] == 0.5


def test_conversations_are_told_apart_by_their_context() -> None:
    first, second = needle(), needle()
    other = Task(
        kind="needle", name="o", context=[9], question=[3], answers=("7",), answer_tokens=4
    )
    assert seeds.conversations([first, second, other]) == [[first, second], [other]]


def test_tables_are_filled_in_between_their_marks() -> None:
    items = peer.items_of([list(range(perplexity.PROMPT + 5))] * 2, [needle()], TOKENIZER)
    document = {"figures": peer.figures(peer_rows(items), items)}
    text = "a\n<!-- kvpress -->\nold\n<!-- end -->\nb\n<!-- served -->\nstays\n<!-- end -->\n"
    once = fill(text, tables.tables(document))
    assert "old" not in once
    assert "stays" in once
    assert "| h2o | " in once
    assert once.startswith("a\n<!-- kvpress -->\n2 texts, 1 needles.\n\n| policy |")
    assert fill(once, tables.tables(document)) == once
