"""The same policies in kvpress, on the same model and text, beside ours.

kvpress lives in an environment of its own; its side is a script that needs nothing of this project
(`kvpress_side.py`). Both sides prune once, at the end of the context, to the same share, and then
read the same tail. kvpress keeps other tokens in every layer and head; ours keeps one set.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from vtoken_sglang_eval.chat import ChatTokenizer

from vtoken_sglang.errors import VTokenError

from .cells import FULL, Cell
from .perplexity import PROMPT
from .questions import accuracy_figure
from .reference import ReferenceModel
from .rows import Deadline, Rows
from .runs import beginning, branch, read_on
from .tasks import Task

# Our name -> the press that does the same. Scissorhands has none.
PRESSES: Final = {
    "h2o": "ObservedAttentionPress",
    "keydiff": "KeyDiffPress",
    "knorm": "KnormPress",
    "random": "RandomPress",
    "snapkv": "SnapKVPress",
    "streaming_llm": "StreamingLLMPress",
    "tova": "TOVAPress",
}
KEEP: Final = 0.5
SIDE: Final = Path(__file__).with_name("kvpress_side.py")
SETTINGS: Final = {"keep": KEEP, "looks": "once, at the end of the context"}


class PeerError(VTokenError):
    """kvpress could not be run."""


def items_of(
    texts: Sequence[Sequence[int]], needles: Sequence[Task], tokenizer: ChatTokenizer
) -> list[dict[str, Any]]:
    """What both sides read: {"name", "context", "tail", "scored_from"} with token ids. The tail is
    read after pruning, its tokens from `scored_from` on are scored: a text's continuation, or the
    right answer to a question."""
    items = [
        {
            "name": f"text_{number}",
            "context": list(text[:PROMPT]),
            "tail": list(text[PROMPT:]),
            "scored_from": 1,
        }
        for number, text in enumerate(texts)
    ]
    for task in needles:
        (right,) = task.answers
        items.append(
            {
                "name": f"needle_{task.name}",
                "context": task.context,
                "tail": [*task.question, *tokenizer.encode(f" {right}")],
                "scored_from": len(task.question),
            }
        )
    return items


def measure_ours(
    model: ReferenceModel, items: Sequence[Mapping[str, Any]], rows: Rows, deadline: Deadline
) -> bool:
    """Read every item that `rows` lacks; returns whether all are there."""
    cells = (FULL, *(Cell(policy, KEEP) for policy in PRESSES))
    for number, one in enumerate(items):
        if (unit := f"ours/{one['name']}") in rows.found:
            continue
        if deadline.passed:
            return False
        context, tail = one["context"], one["tail"]
        # As long as the context: the only look is due where it ends.
        options = [cell.options(len(context), seed=number) for cell in cells]
        lanes, _ = branch(beginning(model, context, options), context, options, len(tail))
        readings = read_on(lanes, options, tail, step=0, scored_from=one["scored_from"])
        found = {
            cell.policy: {"surprise": reading.surprise, "exact": reading.exact}
            for cell, reading in zip(cells, readings, strict=True)
        }
        rows.add(unit, found)
        print(f"kvpress comparison, ours: {number + 1} of {len(items)}", flush=True)
    return True


def measure_theirs(
    python: Path, model: str, items: Sequence[Mapping[str, Any]], rows: Rows, deadline: Deadline
) -> bool:
    """The same in kvpress's environment; returns whether all are there.

    Args:
        python: interpreter of an environment that has kvpress.

    Raises:
        PeerError: the interpreter does not start, or kvpress failed there.
    """
    missing = [one for one in items if f"kvpress/{one['name']}" not in rows.found]
    if not missing:
        return True
    asked = {"model": model, "items": missing, "presses": PRESSES, "ratio": 1 - KEEP}
    try:
        process = subprocess.Popen(
            [str(python), str(SIDE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise PeerError(f"--kvpress-python {python}: {error.strerror}") from error
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        for number, line in enumerate(process.stdout):
            answer = json.loads(line)
            rows.add(f"kvpress/{answer['name']}", answer["found"])
            rows.add("kvpress/versions", answer["versions"])
            print(f"kvpress comparison, theirs: {number + 1} of {len(missing)}", flush=True)
            if deadline.passed:
                process.terminate()
                break
    done = all(f"kvpress/{one['name']}" in rows.found for one in items)
    if process.returncode and not done and not deadline.passed:
        raise PeerError(f"kvpress ended with exit status {process.returncode}")
    return done


def figures(rows: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`kvpress_gap_{policy}_keep50`: how much more ours is surprised by the text, per token.

    Also the two perplexities behind it, the same gap on answers to needle questions, and how many
    of them each side would have given.
    """
    texts = [one["name"] for one in items if one["scored_from"] == 1]
    needles = [one["name"] for one in items if one["scored_from"] > 1]
    found: dict[str, Any] = {}
    for policy in (FULL.policy, *PRESSES):
        name = "full" if policy == FULL.policy else f"{policy}_keep{round(100 * KEEP)}"
        ours, theirs = (
            np.array([rows[f"{side}/{text}"][policy]["surprise"] for text in texts])
            for side in ("ours", "kvpress")
        )
        found[f"kvpress_gap_{name}"] = gap_figure(ours - theirs)
        for side, values in (("ours", ours), ("kvpress", theirs)):
            found[f"once_perplexity_{side}_{name}"] = {
                "value": float(np.exp(values.mean())),
                "unit": f"perplexity after one look, {len(values)} texts",
                "spread": None,
            }
            right = [rows[f"{side}/{needle}"][policy]["exact"] for needle in needles]
            if right:
                found[f"once_needle_{side}_{name}"] = accuracy_figure([*map(float, right)])
    return found


def gap_figure(gaps: np.ndarray) -> dict[str, Any]:
    """Mean difference of paired surprises with its standard error over texts."""
    error = float(gaps.std(ddof=1) / np.sqrt(len(gaps))) if len(gaps) > 1 else None
    return {
        "value": float(gaps.mean()),
        "unit": "nats per token, ours - kvpress on the same texts (below 0: ours is better); "
        "its exponential is the ratio of perplexities",
        "spread": {
            "min": float(gaps.min()),
            "max": float(gaps.max()),
            "standard_error": error,
            "texts": len(gaps),
        },
    }
