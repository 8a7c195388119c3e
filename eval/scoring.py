"""Quality of a run's answers: exact recall where answers are known, agreement everywhere.

`recall` is a task score: the share of scored questions whose answer contains an expected text as a
word of its own. `agreement` is a proxy, no task score: how far an arm's answers run along with
those of the unpruned arm, as the mean share of an answer before the first token that differs, over
requests with equal prompts (in later turns of a session, prompts differ once an answer did).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .chat import ChatTokenizer
from .client import RequestRecord
from .compare import first_difference
from .workload import Workload


def contains(answer: str, expected: str) -> bool:
    """Whether `expected` stands in the answer, letter case ignored, not inside a longer word."""
    found = re.search(rf"(?<!\w){re.escape(expected.strip())}(?!\w)", answer, re.IGNORECASE)
    return bool(expected.strip()) and found is not None


def recall(
    workload: Workload, records: Sequence[RequestRecord], tokenizer: ChatTokenizer
) -> dict[str, float]:
    """`recall` and `scored_answers` of one run; empty where nothing was expected."""
    right = scored = 0
    for record in records:
        session = workload.sessions[record.session]
        if record.error or not session.expected or not session.expected[record.turn]:
            continue
        answer = tokenizer.decode(record.output_ids)
        scored += 1
        right += any(contains(answer, text) for text in session.expected[record.turn])
    return {"recall": right / scored, "scored_answers": scored} if scored else {}


def agreement(ours: Mapping[str, Any], unpruned: Mapping[str, Any]) -> float | None:
    """Of two runs (with `requests`); None where no prompt was equal or no ids are known."""
    expected = {(r["session"], r["turn"]): r for r in unpruned["requests"]}
    shares = []
    for request in ours["requests"]:
        other = expected.get((request["session"], request["turn"]))
        if other is None or request["prompt_hash"] != other["prompt_hash"]:
            continue
        got, want = request["output_ids"], other["output_ids"]
        if got and want:
            shares.append(first_difference(got, want) / len(want))
    return sum(shares) / len(shares) if shares else None
