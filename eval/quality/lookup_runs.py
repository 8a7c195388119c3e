"""Lookups answered under eviction: on the served engine where the prompt holds the question, on the
reference where what is kept was decided before the question was known.

Served, the lead words are asked for as a regular expression that the answer must match, so they are
generated after the first look, and the rest is decoded freely. The text stands in the prefix cache;
each question computes its own tokens alone, and all policies answer it side by side. Only what full
attention answers is asked of the policies.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

from vtoken_sglang_eval.chat import ChatTokenizer
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.policy_server import PolicyServer

from .cells import FULL, Cell
from .questions import INTERVAL, PAGE_SIZE, accuracy_figure
from .reference import ReferenceModel
from .rows import Deadline, Rows
from .runs import answer, beginning, branch
from .tasks import Task, score

KEEPS: Final = (0.75, 0.5, 0.25, 0.125)
POLICIES: Final = ("keydiff_snapkv", "keydiff_local", "keydiff", "snapkv")
LENGTHS: Final = (1024, 2048, 4096)
POOL: Final = 16384
SETTINGS: Final = {"interval": INTERVAL, "page_size": PAGE_SIZE, "pool": POOL}
# Nothing of a question reaches the prefix cache, and what is evicted of the text is not copied.
PRIVATE: Final = {"publish": "never", "shared": "mask"}
UNPRUNED: Final = {"policy": "streaming_llm", "keep": 1.0, **PRIVATE}
_SPECIAL = re.compile(r"([\\.^$|?*+()\[\]{}])")


def unit_of(task: Task, cell: Cell) -> str:
    return f"{task.kind}/{task.name}/{cell.name}"


class LookupServer(PolicyServer):
    """A server with a prefix cache that computes a prompt in one chunk."""

    def __init__(self, model: str, folder: Path) -> None:
        # The share of memory that SGLang derives comes out negative with such a chunk.
        flags = ["--chunked-prefill-size", str(POOL), "--mem-fraction-static", "0.3"]
        super().__init__(model, POOL, folder / "server.log", *flags, page_size=PAGE_SIZE)

    def keep_in_cache(self, context: Sequence[int]) -> None:
        """Compute a text and leave it to the prefix cache."""
        self.generate(context, 1, {"policy": "none"})

    def look_up(self, task: Task, tokenizer: ChatTokenizer, cell: Cell) -> dict[str, Any]:
        """One greedy answer that begins with the task's lead: text, score, cached tokens."""
        options = UNPRUNED if cell == FULL else {**cell.request(INTERVAL), **PRIVATE}
        lead = _SPECIAL.sub(r"\\\1", task.lead)
        sampling = {
            "temperature": 0,
            "max_new_tokens": len(tokenizer.encode(task.lead)) + task.answer_tokens,
            "regex": rf"{lead} [^\n]+",
            "custom_params": {"vtoken": options},
        }
        body = {"input_ids": task.prompt, "sampling_params": sampling}
        found = json.loads(self.ask("/generate", body))
        text = str(found["text"])
        return {
            "answer": text,
            "score": score(task, text.removeprefix(task.lead)),
            "cached": int(found["meta_info"]["cached_tokens"]),
        }


def measure_served(
    model: str,
    tokenizer: ChatTokenizer,
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    rows: Rows,
    deadline: Deadline,
) -> bool:
    """Ask what `rows` lacks, the prompt holding the question; returns whether all is there."""
    if not any(_due(task, cells, rows) for task in tasks):
        return True
    with tempfile.TemporaryDirectory() as folder, LookupServer(model, Path(folder)) as server:
        cached: list[int] = []
        for task in tasks:
            while due := _due(task, cells, rows):
                if deadline.passed:
                    return False
                if cached != task.context:
                    cached = task.context
                    server.keep_in_cache(cached)
                with ThreadPoolExecutor(len(due)) as pool:
                    answers = pool.map(partial(server.look_up, task, tokenizer), due)
                    for cell, found in zip(due, answers, strict=True):
                        _add(rows, task, cell, found)
    return True


def measure_reference(
    model: ReferenceModel,
    tokenizer: ChatTokenizer,
    tasks: Sequence[Task],
    cells: Sequence[Cell],
    rows: Rows,
    deadline: Deadline,
    end_tokens: Sequence[int],
) -> bool:
    """Ask what `rows` lacks, the policy looking at the text alone; returns whether all is there."""
    for task in tasks:
        while due := _due(task, cells, rows):
            if deadline.passed:
                return False
            options = [cell.options(INTERVAL) for cell in due]
            later = [*task.question, *tokenizer.encode(task.lead)]
            lanes, logits = branch(
                beginning(model, task.context, options), task.context, options,
                len(later) + task.answer_tokens,
            )  # fmt: skip
            answers = answer(
                lanes, logits, options, later, tokens=task.answer_tokens,
                end_tokens=end_tokens, page_size=PAGE_SIZE,
            )  # fmt: skip
            for cell, found in zip(due, answers, strict=True):
                text = tokenizer.decode(found.token_ids)
                _add(rows, task, cell, {"answer": text, "score": score(task, text)})
    return True


def _due(task: Task, cells: Sequence[Cell], rows: Rows) -> list[Cell]:
    """Full attention first, then the cells not asked yet, unless it had no answer."""
    full = rows.found.get(unit_of(task, FULL))
    if full is None:
        return [FULL]
    if full["score"] < 1:
        return []
    return [cell for cell in cells if unit_of(task, cell) not in rows.found]


def _add(rows: Rows, task: Task, cell: Cell, found: Mapping[str, Any]) -> None:
    facts = {"kind": task.kind, "cell": cell.name, **task.facts}
    rows.add(unit_of(task, cell), {**facts, **found})
    print(f"lookups: {unit_of(task, cell)}: {found['score']:g}", flush=True)


def figures(
    rows: Mapping[str, Any], tasks: Sequence[Task], cells: Sequence[Cell], suffix: str
) -> dict[str, Any]:
    """`right_{policy}_keep{ratio}_{suffix}` over all questions that full attention answers, and
    the same by kind; `n_` and `ci_` (half the width of the interval) beside the former.

    Raises:
        FiguresError: full attention answers none.
    """
    able = [task for task in tasks if rows[unit_of(task, FULL)]["score"] == 1]
    if not able:
        raise FiguresError("full attention answers none of the questions")
    found: dict[str, Any] = {
        f"asked_{suffix}": _plain(len(tasks), "questions asked of full attention"),
        f"answered_{suffix}": _plain(len(able), "questions that full attention answers"),
    }
    for cell in cells:
        if cell == FULL:
            continue
        scores = [(task.kind, rows[unit_of(task, cell)]["score"]) for task in able]
        name = f"{cell.name}_{suffix}"
        for kind in ("", *dict.fromkeys(kind for kind, _ in scores)):
            chosen = [value for its_kind, value in scores if kind in ("", its_kind)]
            found[f"right_{name}" + f"_{kind}" * bool(kind)] = accuracy_figure(chosen)
        spread = found[f"right_{name}"]["spread"]
        found[f"n_{name}"] = _plain(spread["count"], "questions that full attention answers")
        half = (spread["high"] - spread["low"]) / 2
        found[f"ci_{name}"] = _plain(half, "half the width of the 95 % interval")
    return found


def _plain(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "spread": None}
