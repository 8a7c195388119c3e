"""Questions of RULER (https://arxiv.org/abs/2404.06654), made by its own generator beforehand.

The generator writes TASK/validation.jsonl, one sample per line with "input" (the whole prompt) and
"outputs" (what the answer must hold). How to run it: docs/quality.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vtoken_sglang_eval.chat import ChatTokenizer
from vtoken_sglang_eval.errors import DatasetError

from .tasks import Task

ANSWER_TOKENS = {"vt": 30, "cwe": 60, "fwe": 40}
OTHER_ANSWER_TOKENS = 16
# Beside the longest single answer: what may stand before it.
SPARE_TOKENS = 6


def read_tasks(folder: Path, tokenizer: ChatTokenizer, samples: int) -> list[Task]:
    """The first `samples` samples of every task in `folder`, in the order of their names.

    Raises:
        DatasetError: no task there, one has too few samples, or a line is of another form.
    """
    paths = sorted(folder.glob("*/validation.jsonl"))
    if not paths:
        raise DatasetError(f"{folder}: holds no TASK/validation.jsonl")
    tasks = []
    for path in paths:
        name = path.parent.name
        try:
            lines = path.read_text(encoding="utf-8").splitlines()[:samples]
            found = [_task(name, number, json.loads(line), tokenizer)
                     for number, line in enumerate(lines)]  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DatasetError(f"{path}: not as the generator writes it ({error!r})") from error
        if len(found) < samples:
            raise DatasetError(f"{path}: {len(found)} samples, {samples} are needed")
        tasks += found
    return tasks


def _task(name: str, number: int, record: dict[str, Any], tokenizer: ChatTokenizer) -> Task:
    answers = tuple(map(str, record["outputs"]))
    # An identifier of niah_single_3 alone is about 35 tokens: cut short, nobody could be right.
    longest = max(len(tokenizer.encode(f" {answer}")) for answer in answers)
    return Task(
        kind="ruler",
        name=f"{name}_{number}",
        context=[],
        question=tokenizer.encode(record["input"]),
        answers=answers,
        answer_tokens=max(ANSWER_TOKENS.get(name, OTHER_ANSWER_TOKENS), longest + SPARE_TOKENS),
        facts={"task": name},
    )
