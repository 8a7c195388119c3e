"""SGLang on our CPU platform, nothing else of ours: its answers are the model's own."""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers.reference import Reference
from tests.served.comparisons import LOGPROB_TOLERANCE, against_transformers
from tests.served.conftest import StockRun
from tests.served.mix import Answer, Mix

pytestmark = pytest.mark.server


def test_greedy_answers_equal_transformers(
    stock_answers: dict[str, Answer], mix: Mix, reference: Reference
) -> None:
    lines: list[str] = []
    for case in mix.cases():
        if case.exact:
            lines += against_transformers(case, stock_answers, reference)
    assert lines == []


def test_prompt_log_probabilities_equal_transformers(
    stock_answers: dict[str, Answer], mix: Mix, reference: Reference
) -> None:
    (case,) = [case for case in mix.alone if "logprob_start_len" in case.fields]
    rows = reference.forward(case.prompt)
    expected = [float(rows[at, token]) for at, token in enumerate(case.prompt[1:])]
    got = stock_answers[case.name].input_logprobs
    assert got == pytest.approx(expected, abs=LOGPROB_TOLERANCE)


def test_the_mix_exercises_what_it_is_for(stock_answers: dict[str, Answer]) -> None:
    assert stock_answers["prefix, first"].cached < 200 <= stock_answers["prefix, second"].cached
    assert stock_answers["whole prompt cached"].cached >= 256
    assert stock_answers["ends by itself"].finish == "stop"
    assert re.fullmatch(r" [0-9]\.[0-9]{3} [a-z]{3,8}\.", stock_answers["regex"].text)
    city = json.loads(stock_answers["json"].text)
    assert set(city) == {"name", "population"}


def test_the_plugin_stays_out_unless_asked_for(stock: StockRun) -> None:
    assert stock.info["page_size"] == 1
    assert "vtoken" not in stock.info
    assert all("vtoken" not in state for state in stock.info["internal_states"])
