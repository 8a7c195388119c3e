"""The same questions asked of a served engine, whose answers and evictions the reference must
predict.

One server for everything: each request names its policy and ratio in `custom_params`. The chunk of
prefill is longer than any prompt and there is no prefix cache, so that the first look comes after
the prompt and every query of it was observed, as in the reference's `after`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vtoken_sglang_eval.chat import ChatTokenizer
from vtoken_sglang_eval.policy_server import PolicyServer

from .cells import FULL, Cell
from .questions import INTERVAL, PAGE_SIZE, unit_of
from .rows import Deadline, Rows
from .tasks import Task, score

POOL: Final = 8192
CHUNK: Final = 8192
KEEP_ALL: Final = "_keep100"
SETTINGS: Final = {
    "interval": INTERVAL,
    "page_size": PAGE_SIZE,
    "chunk": CHUNK,
    "pool": POOL,
    "prefix_cache": False,
}


class AnswerServer(PolicyServer):
    """A server that says which tokens it evicted, as a context manager."""

    def __init__(self, model: str, folder: Path, *more: str) -> None:
        self._trace = folder / "evictions.jsonl"
        flags = ["--chunked-prefill-size", str(CHUNK), *more]
        flags += ["--vtoken-publish", "never", "--vtoken-trace", str(self._trace)]
        super().__init__(model, POOL, folder / "server.log", *flags, page_size=PAGE_SIZE)

    def answer(self, unit: str, task: Task, options: Mapping[str, Any]) -> dict[str, Any]:
        """Send one greedy request; returns its ids, its evictions, each with its logical length,
        and how many prompt tokens were cached."""
        tokens = task.answer_tokens
        found = self.generate(task.prompt, tokens, options, unit, ignore_eos=False)
        evicted = [
            (line["logical_len"], line["evicted"])
            for line in map(json.loads, self._evictions())
            if line["rid"] == unit
        ]
        return {
            "answer": [int(token) for token in found["output_ids"]],
            "evicted": evicted,
            "cached": int(found["meta_info"]["cached_tokens"]),
        }

    def _evictions(self) -> list[str]:
        return self._trace.read_text("utf-8").splitlines() if self._trace.exists() else []


def measure(
    model: str,
    tokenizer: ChatTokenizer,
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    rows: Rows,
    deadline: Deadline,
) -> bool:
    """Ask for every answer that `rows` lacks; returns whether all are there."""
    missing = [
        (unit, task, cell)
        for task in tasks
        for cell in cells
        if (unit := f"{unit_of(task, 'after')}/{cell.name}") not in rows.found
    ]
    if not missing:
        return True
    # Without a prefix cache: unpruned requests would seed it, and an observed request that hits it
    # knows only of its own queries.
    with (
        tempfile.TemporaryDirectory() as folder,
        AnswerServer(model, Path(folder), "--disable-radix-cache") as server,
    ):
        for number, (unit, task, cell) in enumerate(missing):
            if deadline.passed:
                return False
            found = server.answer(unit, task, cell.request(INTERVAL))
            found["score"] = score(task, tokenizer.decode(found["answer"]))
            question = {"question": unit_of(task, "after"), "kind": task.kind, "cell": cell.name}
            rows.add(unit, {**question, **found})
            print(f"served: {unit} ({number + 1} of {len(missing)})", flush=True)
    return True


def by_question(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Served rows in the form of the reference's, for `questions.figures`."""
    found: dict[str, Any] = {}
    for row in rows.values():
        if row["cell"].endswith(KEEP_ALL):
            continue
        entry = {"kind": row["kind"], "placement": "served", "cells": {}}
        found.setdefault(row["question"], entry)["cells"][row["cell"]] = row
    return found


def keep_all_figure(rows: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A ratio of 1 evictions nothing and answers as full attention does: how often it did not."""
    asked = [row for row in rows.values() if row["cell"].endswith(KEEP_ALL)]
    full = {row["question"]: row["answer"] for row in rows.values() if row["cell"] == FULL.name}
    wrong = sum(bool(row["evicted"]) or row["answer"] != full[row["question"]] for row in asked)
    return {
        "served_keep100_mismatches": {
            "value": wrong,
            "unit": "served requests with keep 1.0 that lost a token or answered otherwise",
            "spread": {"requests": len(asked)},
        }
    }


def disagreements(
    rows: Mapping[str, Any], reference: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """What the served engine did otherwise than the reference, over the requests of both.

    A token counts as evicted up to the first look; later ones follow an answer that may differ.
    """
    answers = requests = tokens = evictions = 0
    for row in rows.values():
        expected = reference.get(row["question"], {}).get("cells", {}).get(row["cell"])
        if expected is None:
            continue
        requests += 1
        answers += row["answer"] != expected["answer"]
        served, known = (
            {tuple([length, pos]) for length, dead in side["evicted"][:1] for pos in dead}
            for side in (row, expected)
        )
        tokens += len(served ^ known)
        evictions += len(known)
    if not requests:
        return {}
    return {
        "served_eviction_mismatches": {
            "value": tokens,
            "unit": "tokens evicted by the served engine or the reference but not by both",
            "spread": {"requests": requests, "tokens_evicted": evictions},
        },
        "served_answer_mismatches": {
            "value": answers,
            "unit": "served answers that are not the reference's, token for token",
            "spread": {"requests": requests},
        },
    }
