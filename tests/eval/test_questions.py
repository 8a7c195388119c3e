"""Questions asked in every cell: what lm-eval is told, and how scores are put together."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.questions import ask_lm_eval, summary_of


def test_lm_eval_gets_the_server_and_the_arm_s_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def simple_evaluate(**words: Any) -> dict[str, Any]:
        asked.update(words)
        scores = {"alias": "gsm8k", "exact_match,strict": 0.25, "exact_match_stderr,strict": 0.1}
        return {"results": {"gsm8k": {**scores, "exact_match,flexible": 0.5}}}

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))
    options, request = Options(lm_eval=("gsm8k",), lm_eval_limit=7), {"policy": "tova", "keep": 0.5}
    rows = ask_lm_eval("http://h:1", "model", options, request)
    assert rows == [{"kind": "lm_eval gsm8k", "name": "exact_match,strict", "score": 0.25}]
    assert asked["model_args"]["base_url"] == "http://h:1/v1/completions"
    assert asked["gen_kwargs"] == {"custom_params": {"vtoken": request}}
    assert (asked["tasks"], asked["limit"]) == (["gsm8k"], 7)


def test_quality_is_the_mean_over_all_questions_and_by_kind() -> None:
    answers = [
        {"kind": "needle", "name": "a", "score": 1.0},
        {"kind": "needle", "name": "b", "score": 0.0},
        {"kind": "recall", "name": "c", "score": 1.0},
        {"kind": "recall", "name": "d", "score": 1.0},
    ]
    assert summary_of(answers) == {
        "quality": 0.75, "questions": 4.0, "quality_needle": 0.5, "quality_recall": 1.0
    }  # fmt: skip
    assert summary_of([]) == {}
