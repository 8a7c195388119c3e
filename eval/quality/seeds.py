"""Whether scores gathered on a cached prefix help the next request that hits it.

One conversation, four questions about it, one after the other on a served engine that publishes
prompts: the first request computes and seeds the prefix, the others hit it. With
`reuse_prefix_scores` off they know of it only what their own few queries saw.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vtoken_sglang_eval.chat import ChatTokenizer
from vtoken_sglang_eval.targets import flush_cache

from .cells import Cell
from .questions import INTERVAL, accuracy_figure
from .rows import Deadline, Rows
from .served import AnswerServer
from .tasks import Task, score

POLICIES: Final = ("h2o", "scissorhands")
KEEPS: Final = (0.5, 0.25)
SWITCHES: Final = ("on", "off")
FLUSH_TRIES: Final = 20


def conversations(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks that share their context, in order."""
    found: dict[tuple[int, ...], list[Task]] = {}
    for task in tasks:
        found.setdefault(tuple(task.context), []).append(task)
    return list(found.values())


def measure(
    model: str,
    tokenizer: ChatTokenizer,
    tasks: Sequence[Task],
    rows: Rows,
    deadline: Deadline,
) -> bool:
    """Ask what `rows` lacks, a conversation at a time; returns whether all is there."""
    missing = [
        (unit, cell, switch, asked)
        for number, asked in enumerate(conversations(tasks))
        for cell in (Cell(policy, keep) for policy in POLICIES for keep in KEEPS)
        for switch in SWITCHES
        if (unit := f"{number}/{cell.name}/{switch}") not in rows.found
    ]
    if not missing:
        return True
    with tempfile.TemporaryDirectory() as folder, AnswerServer(model, Path(folder)) as server:
        for at, (unit, cell, switch, asked) in enumerate(missing):
            if deadline.passed:
                return False
            options = {**cell.request(INTERVAL), "publish": "prompt", "reuse_prefix_scores": switch}
            flush_cache(server.base_url, FLUSH_TRIES)
            found = []
            for task in asked:
                one = server.answer(f"{unit}/{task.name}", task, options)
                right = score(task, tokenizer.decode(one["answer"]))
                found.append({"score": right, "cached": one["cached"]})
            rows.add(unit, {"cell": cell.name, "switch": switch, "questions": found})
            print(f"seeds: {unit} ({at + 1} of {len(missing)})", flush=True)
    return True


def figures(rows: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`reuse_prefix_scores_{on,off}_recall_{cell}` over the requests that hit the cache."""
    scores: dict[str, list[float]] = defaultdict(list)
    for row in rows.values():
        hits = [one["score"] for one in row["questions"] if one["cached"]]
        scores[f"reuse_prefix_scores_{row['switch']}_recall_{row['cell']}"] += hits
    return {name: accuracy_figure(values) for name, values in scores.items() if values}
