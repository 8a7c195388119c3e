"""Lookups: every answer stands in its text once, leads stay out of prompts, and what full attention
cannot answer is not asked of a policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.quality import lookup_runs
from vtoken_sglang_eval.quality.cells import FULL, Cell, grid
from vtoken_sglang_eval.quality.lookups import KINDS, lookups
from vtoken_sglang_eval.quality.rows import Deadline, Rows
from vtoken_sglang_eval.quality.tasks import Task

from tests.eval.test_quality_tasks import TOKENIZER, endless

CELLS = grid(["keydiff", "snapkv"], (0.5, 0.125))


def tasks_of(rounds: int = 1, seed: int = 3) -> list[Task]:
    return lookups(TOKENIZER, endless, (3000,), rounds, seed)


def test_lookups_follow_from_the_seed_and_more_rounds_go_on() -> None:
    first = tasks_of()
    assert first == tasks_of()
    assert tasks_of(2)[: len(first)] == first
    assert first != tasks_of(seed=4)
    assert {task.kind for task in first} == set(KINDS)
    names = [lookup_runs.unit_of(task, FULL) for task in tasks_of(2)]
    assert len(set(names)) == len(names)


def test_an_answer_stands_in_its_text_and_the_lead_does_not_follow_the_question() -> None:
    for task in tasks_of(2):
        text, question = TOKENIZER.decode(task.context), TOKENIZER.decode(task.question)
        assert question.endswith("<assistant>")
        assert task.lead
        assert task.lead not in question
        for answer in task.answers:
            assert answer not in question
            assert answer in text
            if task.kind in ("needle", "keys", "values", "tracking"):
                assert len(re.findall(rf"\b{answer}\b", text)) == 1
        assert 2500 < len(text) < 4500


def test_questions_of_a_text_share_it() -> None:
    texts = {(task.kind, tuple(task.context)) for task in tasks_of()}
    assert len(texts) == len(KINDS)


class FakeServer:
    """Full attention answers all but needles; keydiff answers what is asked at half the memory."""

    asked: list[tuple[str, str]]
    cached: list[Sequence[int]]

    def __init__(self, model: str, folder: Path) -> None: ...

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None: ...

    def keep_in_cache(self, context: Sequence[int]) -> None:
        self.cached.append(context)

    def look_up(self, task: Task, tokenizer: object, cell: Cell) -> dict[str, Any]:
        self.asked.append((task.kind, cell.name))
        able = task.kind != "needle" if cell == FULL else cell.name == "keydiff_keep50"
        return {"answer": "", "score": float(able), "cached": 0}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> type[FakeServer]:
    FakeServer.asked, FakeServer.cached = [], []
    monkeypatch.setattr(lookup_runs, "LookupServer", FakeServer)
    return FakeServer


def test_only_what_full_attention_answers_is_asked_and_once(
    server: type[FakeServer], tmp_path: Path
) -> None:
    tasks, rows = tasks_of(), Rows(tmp_path / "rows.jsonl", {})
    asked = ("", TOKENIZER, tasks, CELLS, rows)
    assert not lookup_runs.measure_served(*asked, Deadline(0))
    assert server.asked == []
    assert lookup_runs.measure_served(*asked, Deadline(None))
    assert ("needle", "full") in server.asked
    assert ("needle", "keydiff_keep50") not in server.asked
    assert sorted(server.asked) == sorted(
        (task.kind, cell.name)
        for task in tasks
        for cell in CELLS
        if cell == FULL or task.kind != "needle"
    )
    assert len(server.cached) == len(KINDS)
    before = len(server.asked)
    assert lookup_runs.measure_served(*asked, Deadline(None))
    assert len(server.asked) == before

    figures = lookup_runs.figures(rows.found, tasks, CELLS, "seen")
    able = sum(task.kind != "needle" for task in tasks)
    assert figures["asked_seen"]["value"] == len(tasks)
    assert figures["answered_seen"]["value"] == figures["n_snapkv_keep12_seen"]["value"] == able
    assert figures["right_keydiff_keep50_seen"]["value"] == 1
    assert figures["right_snapkv_keep50_seen_keys"]["value"] == 0
    spread = figures["right_snapkv_keep12_seen"]["spread"]
    assert figures["ci_snapkv_keep12_seen"]["value"] == (spread["high"] - spread["low"]) / 2
    assert "right_keydiff_keep50_seen_needle" not in figures


def test_no_figures_without_an_answer_of_full_attention(tmp_path: Path) -> None:
    tasks = tasks_of()[:1]
    rows = {lookup_runs.unit_of(tasks[0], FULL): {"score": 0.0}}
    with pytest.raises(FiguresError, match="answers none"):
        lookup_runs.figures(rows, tasks, CELLS, "seen")
