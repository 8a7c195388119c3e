"""Questions answered on the reference, the policy looking after the question or before it.

after: the prompt holds the question, as a served request does; the first look comes when the first
generated token is in the cache. before: the policy looks at the text alone, then the question is
read: harder, and what kvpress does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vtoken_sglang_eval.chat import ChatTokenizer

from .cells import Cell
from .reference import Lanes, ReferenceModel
from .rows import Deadline, Rows
from .runs import Answer, answer, beginning, branch
from .tasks import Task, score

PLACEMENTS: Final = ("after", "before")
INTERVAL: Final = 16
PAGE_SIZE: Final = 16
SETTINGS: Final = {"interval": INTERVAL, "page_size": PAGE_SIZE}


def unit_of(task: Task, placement: str) -> str:
    return f"{task.kind}/{task.name}/{placement}"


def measure(
    model: ReferenceModel,
    tokenizer: ChatTokenizer,
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    rows: Rows,
    deadline: Deadline,
    end_tokens: Sequence[int],
) -> bool:
    """Answer every question that `rows` lacks; returns whether all are there."""
    options = [cell.options(INTERVAL) for cell in cells]
    kept: tuple[list[int], Lanes] | None = None
    for number, task in enumerate(tasks):
        for placement in placements_of(task):
            if (unit := unit_of(task, placement)) in rows.found:
                continue
            if deadline.passed:
                return False
            if kept is None or kept[0] != task.context:
                kept = (task.context, beginning(model, task.context, options))
            question = task.question if placement == "before" else []
            prompt = task.context if question else task.prompt
            lanes, logits = branch(kept[1], prompt, options, len(question) + task.answer_tokens)
            answers = answer(
                lanes, logits, options, question, tokens=task.answer_tokens,
                end_tokens=end_tokens, page_size=PAGE_SIZE,
            )  # fmt: skip
            found = {
                cell.name: _result(task, tokenizer, one)
                for cell, one in zip(cells, answers, strict=True)
            }
            rows.add(
                unit, {"kind": task.kind, "placement": placement, **task.facts, "cells": found}
            )
            print(f"questions: {unit} ({number + 1} of {len(tasks)})", flush=True)
    return True


def placements_of(task: Task) -> tuple[str, ...]:
    """Both, where the text can be told from the question."""
    return PLACEMENTS if task.context else PLACEMENTS[:1]


def _result(task: Task, tokenizer: ChatTokenizer, found: Answer) -> dict[str, Any]:
    return {
        "score": score(task, tokenizer.decode(found.token_ids)),
        "answer": found.token_ids,
        "evicted": found.evicted,
    }


def figures(rows: Mapping[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Mean score per kind, placement and cell, named `needle_after_h2o_keep50`."""
    scores: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows.values():
        for cell, result in row["cells"].items():
            scores[f"{prefix}{row['kind']}_{row['placement']}_{cell}", row["kind"]].append(
                result["score"]
            )
    return {name: accuracy_figure(values) for (name, _), values in scores.items()}


def accuracy_figure(values: Sequence[float]) -> dict[str, Any]:
    """Mean of scores in [0, 1] with Wilson's 95 % interval and their number."""
    count, mean = len(values), sum(values) / len(values)
    z = 1.96
    middle = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z * math.sqrt(mean * (1 - mean) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    )
    return {
        "value": mean,
        "unit": "share of questions answered right (spread: 95 % interval)",
        "spread": {
            "low": max(0.0, middle - half),
            "high": min(1.0, middle + half),
            "count": count,
        },
    }
