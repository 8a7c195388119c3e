"""What `--quality` asks in every cell, through its server and with the arm's own options.

Five needles at different depths and four facts told two turns earlier in each round, RULER's
questions where its data are given, and generation tasks of lm-eval. Every repeat draws others. They
are sent after the load, so that they cost it nothing.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .chat import ChatTokenizer
from .client import LoadClient
from .errors import ConfigError
from .options import Options
from .quality.ruler import read_tasks
from .quality.tasks import Task, needles, recalls, score
from .quality.text import sentences
from .sharegpt import Dataset, find_dataset, load_dataset
from .workloads.base import Session, Workload

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
LANES = 4
SAMPLES = 4  # of every RULER task
NEEDED = "lm_eval"


def check_extras(options: Options) -> None:
    """Raise ConfigError if lm-eval is asked for and is not there, or knows no such task."""
    if not options.lm_eval:
        return
    if importlib.util.find_spec(NEEDED) is None:
        rule = "needs lm-eval, which is not installed: pip install 'lm_eval[api]'"
        raise ConfigError("lm_eval", rule, ",".join(options.lm_eval))
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

    for name in options.lm_eval:
        if name not in TaskManager().all_tasks:
            raise ConfigError("lm_eval", "must be a task that `lm_eval ls tasks` shows", name)


def tasks_of(
    options: Options, dataset: Dataset, tokenizer: ChatTokenizer, repeat: int
) -> list[Task]:
    """The questions of one repeat; none without `--quality`.

    Raises:
        DatasetError: no text to hide them in, or no RULER where it should be.
    """
    if not options.quality:
        return []
    text = dataset if dataset.conversations else load_dataset(find_dataset(None))

    def source(key: str) -> Iterator[str]:
        return sentences(text, key)

    length, rounds = options.quality_tokens, options.quality_rounds
    seed = 1000 * options.seed + repeat
    found = [
        *needles(tokenizer, source, (length,), DEPTHS, rounds, seed),
        *recalls(tokenizer, source, length, rounds, seed),
    ]
    if options.ruler_data:
        found += read_tasks(Path(options.ruler_data), tokenizer, SAMPLES)
    return found


def ask(
    base_url: str,
    tasks: Sequence[Task],
    request: Mapping[str, Any],
    tokenizer: ChatTokenizer,
    interval: float,
) -> list[dict[str, Any]]:
    """Send every question with an arm's request options; returns kind, name and score of each.
    An answer that failed counts as wrong."""
    sessions = tuple(
        Session(session=at, first_prompt=tuple(task.prompt), answer_tokens=(task.answer_tokens,))
        for at, task in enumerate(tasks)
    )
    workload = Workload(name="questions", sessions=sessions).over(LANES)
    trace = LoadClient(base_url, interval, request).run(workload)
    return [
        {
            "kind": task.kind,
            "name": task.name,
            "score": 0.0 if record.error else score(task, tokenizer.decode(record.output_ids)),
        }
        for task, record in zip(tasks, trace.records, strict=True)
    ]


def summary_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`quality`, the mean score, `questions`, and `quality_KIND`; empty for no answers."""
    if not answers:
        return {}
    found = {"quality": _mean(answers), "questions": float(len(answers))}
    for kind in sorted({str(one["kind"]) for one in answers}):
        found[f"quality_{kind}"] = _mean([one for one in answers if one["kind"] == kind])
    return found


def _mean(answers: Sequence[Mapping[str, Any]]) -> float:
    return sum(float(one["score"]) for one in answers) / len(answers)


def ask_lm_eval(
    base_url: str, model: str, options: Options, request: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The generation tasks of lm-eval through the server's completions endpoint; a row per task
    and measure that lies between 0 and 1."""
    from lm_eval import simple_evaluate  # type: ignore[import-not-found, unused-ignore]

    where = {"base_url": f"{base_url}/v1/completions", "model": model, "tokenizer": model}
    where["tokenizer_backend"] = "huggingface"
    found = simple_evaluate(
        model="local-completions",
        model_args={**where, "num_concurrent": LANES, "tokenized_requests": False},
        tasks=list(options.lm_eval),
        limit=options.lm_eval_limit,
        gen_kwargs={"custom_params": {"vtoken": dict(request)}} if request else None,
        bootstrap_iters=0,
        log_samples=False,
    )
    rows: list[dict[str, Any]] = []
    for task, measures in json.loads(json.dumps(found["results"], default=str)).items():
        for name, value in measures.items():
            if isinstance(value, float) and 0 <= value <= 1 and "stderr" not in name:
                rows.append({"kind": f"lm_eval {task}", "name": name, "score": value})
                break  # a task's first measure is the one it is known by
    return rows
