"""The commands of `python -m vtoken_sglang_eval.quality`: inputs, measurement, figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.chat import ChatTokenizer, ModelTokenizer
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.figures import read_figures, write_figures
from vtoken_sglang_eval.markdown import fill_file
from vtoken_sglang_eval.models import ensure_smollm2
from vtoken_sglang_eval.sharegpt import Dataset, find_dataset, load_dataset

from . import lookup_runs, peer, perplexity, questions, ruler, seeds, served, tables
from .cells import Cell, grid, policy_names
from .lookups import lookups
from .policy_lines import lines_figure
from .reference import ReferenceModel
from .rows import Deadline, Rows, read_rows
from .tasks import Source, Task, needles, recalls
from .text import passages, sentences

MODULE = "vtoken_sglang_eval.quality"
LENGTHS, DEPTHS = (1024, 2048, 3072), (0.1, 0.3, 0.5, 0.7, 0.9)
RECALL_LENGTH = 900
Figures = Mapping[str, Mapping[str, Any]]


def positive(text: str) -> int:
    """A whole number of at least 1. Raises argparse.ArgumentTypeError: it is none."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")


def add_options(name: str, command: argparse.ArgumentParser) -> None:
    """Options of one command alone."""
    add = command.add_argument
    if name in ("perplexity", "kvpress"):
        add("--texts", type=positive, default=12, metavar="N", help="default: 12")
    if name == "questions":
        add("--needles", type=positive, default=1, metavar="N",
            help="per length and depth (default: 1)")  # fmt: skip
        add("--conversations", type=positive, default=5, metavar="N",
            help="for recall (default: 5)")  # fmt: skip
        add("--lengths", type=int, choices=(1, 2, 3), default=3, metavar="N",
            help="how many of the lengths 1024, 2048, 3072 (default: 3)")  # fmt: skip
    if name == "lookups":
        add("--unseen", action="store_true",
            help="look before the question is known, on the reference")  # fmt: skip
        add("--rounds", type=positive, default=2, metavar="N",
            help="texts of every kind and length (default: 2)")  # fmt: skip
        add("--lengths", type=int, choices=(1, 2, 3), default=3, metavar="N",
            help="how many of the lengths 1024, 2048, 4096 (default: 3)")  # fmt: skip
        add("--policies", default=",".join(lookup_runs.POLICIES), metavar="LIST",
            help="by name, separated by commas (default: %(default)s)")  # fmt: skip
    if name == "seeds":
        add("--conversations", type=positive, default=4, metavar="N", help="default: 4")
    if name == "tables":
        add("--doc", type=Path, required=True, metavar="FILE", help="the text to fill in")
    if name == "kvpress":
        add("--kvpress-python", type=Path, required=True, metavar="PATH",
            help="interpreter of an environment that has kvpress")  # fmt: skip
        add("--needles", type=positive, default=2, metavar="N", help="per depth (default: 2)")
    if name == "ruler":
        add("--samples", type=positive, default=4, metavar="N", help="per task (default: 4)")
        add("--ruler-data", type=Path, required=True, metavar="DIR",
            help="what the generator wrote: TASK/validation.jsonl")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What every measurement starts from."""

    model: str
    tokenizer: ModelTokenizer
    dataset: Dataset
    settings: dict[str, Any]
    deadline: Deadline

    def source(self, key: str) -> Iterator[str]:
        """Sentences for the text around one question."""
        return sentences(self.dataset, key)


def inputs_of(chosen: argparse.Namespace) -> Inputs:
    """Find the model and the text that the options name. Raises what finding them raises."""
    model = chosen.model or str(ensure_smollm2())
    dataset = load_dataset(find_dataset(chosen.dataset))
    settings = {
        "model": provenance.model_facts(model)["name"],
        "dataset": dataset.name,
        "dtype": "float32",
        "seed": chosen.seed,
    }
    return Inputs(
        model=model,
        tokenizer=ModelTokenizer(model),
        dataset=dataset,
        settings=settings,
        deadline=Deadline(chosen.minutes),
    )


def write(
    chosen: argparse.Namespace,
    words: Sequence[str],
    figures: Figures,
    settings: Mapping[str, Any],
    topic: str = "policies",
) -> None:
    """Merge one command's figures into --out."""
    document = {
        "topic": topic,
        **provenance.figures_head(MODULE, words),
        "settings": dict(settings),
        "repeats": 1,
        "figures": figures,
    }
    write_figures(chosen.out, document, getattr(chosen, "force", False))
    for name, entry in figures.items():
        print(f"{name:48} {entry['value']:.4g}")


def perplexity_command(chosen: argparse.Namespace, words: list[str]) -> bool:
    inputs = inputs_of(chosen)
    cells = grid(policy_names())
    settings = {**inputs.settings, **perplexity.SETTINGS}
    rows = Rows(
        chosen.work / "perplexity.jsonl", {**settings, "cells": [cell.name for cell in cells]}
    )
    length = perplexity.PROMPT + perplexity.CONTINUATION
    texts = passages(inputs.dataset, inputs.tokenizer, chosen.texts, length, chosen.seed)
    units = [*map(str, range(chosen.texts))]
    if not rows.found.keys() >= set(units):
        model = ReferenceModel.load(Path(inputs.model))
        if not perplexity.measure(model, texts, cells, rows, inputs.deadline):
            return False
    found = {unit: rows.found[unit] for unit in units}
    write(chosen, words, perplexity.figures(found), {**settings, "requests": chosen.texts})
    return True


def _questions(chosen: argparse.Namespace, inputs: Inputs) -> list[Task]:
    lengths, source = LENGTHS[: chosen.lengths], inputs.source
    return [
        *needles(inputs.tokenizer, source, lengths, DEPTHS, chosen.needles, chosen.seed),
        *recalls(inputs.tokenizer, source, RECALL_LENGTH, chosen.conversations, chosen.seed),
    ]


def questions_command(chosen: argparse.Namespace, words: list[str]) -> bool:
    inputs = inputs_of(chosen)
    sizes = {
        "needle_lengths": LENGTHS[: chosen.lengths], "needle_depths": DEPTHS,
        "needles_per_place": chosen.needles, "conversations": chosen.conversations,
    }  # fmt: skip
    return _answer(chosen, words, inputs, _questions(chosen, inputs), sizes)


def ruler_command(chosen: argparse.Namespace, words: list[str]) -> bool:
    inputs = inputs_of(chosen)
    tasks = ruler.read_tasks(chosen.ruler_data, inputs.tokenizer, chosen.samples)
    names = sorted({task.facts["task"] for task in tasks})
    return _answer(chosen, words, inputs, tasks, {"tasks": names, "samples": chosen.samples})


def _answer(
    chosen: argparse.Namespace,
    words: list[str],
    inputs: Inputs,
    tasks: Sequence[Task],
    sizes: Mapping[str, Any],
) -> bool:
    cells = grid(policy_names())
    settings = {**inputs.settings, **questions.SETTINGS, "recall_tokens": RECALL_LENGTH}
    rows = Rows(
        chosen.work / f"{chosen.command}.jsonl",
        {**settings, "cells": [cell.name for cell in cells]},
    )
    model = ReferenceModel.load(Path(inputs.model))
    ends = _end_tokens(model)
    if not questions.measure(model, inputs.tokenizer, tasks, cells, rows, inputs.deadline, ends):
        return False
    found = {
        unit: rows.found[unit]
        for task in tasks
        for unit in (questions.unit_of(task, place) for place in questions.placements_of(task))
    }
    write(chosen, words, questions.figures(found), {**settings, **sizes, "requests": len(tasks)})
    return True


def _end_tokens(model: ReferenceModel) -> list[int]:
    ends = model.model.generation_config.eos_token_id
    return list(ends) if isinstance(ends, list) else [ends]


def served_questions(tokenizer: ChatTokenizer, source: Source, seed: int) -> list[Task]:
    """Those of `questions_command` that every size of it has."""
    recalled = recalls(tokenizer, source, RECALL_LENGTH, 1, seed)
    return [
        *needles(tokenizer, source, LENGTHS[:1], DEPTHS, 1, seed),
        *(task for task in recalled if task.facts["fact"] in ("name", "locker")),
    ]


def served_command(chosen: argparse.Namespace, words: list[str]) -> bool:
    """A part of the questions: the shortest needles of the first round, the first conversation."""
    inputs = inputs_of(chosen)
    wanted = served_questions(inputs.tokenizer, inputs.source, chosen.seed)
    settings = {**inputs.settings, **served.SETTINGS}
    rows = Rows(chosen.work / "served.jsonl", settings)
    everything = [Cell(policy, 1.0) for policy in policy_names()]
    cells = grid(policy_names())
    finished = served.measure(
        inputs.model, inputs.tokenizer, wanted, cells, rows, inputs.deadline
    ) and served.measure(
        inputs.model, inputs.tokenizer, wanted[:1], everything, rows, inputs.deadline
    )
    if not finished:
        return False
    found = {
        **questions.figures(served.by_question(rows.found)),
        **served.keep_all_figure(rows.found),
        **served.disagreements(rows.found, _reference_rows(chosen.work)),
    }
    write(chosen, words, found, {**settings, "requests": len(wanted)})
    return True


def _reference_rows(work: Path) -> dict[str, Any]:
    path = work / "questions.jsonl"
    if not path.exists():
        raise FiguresError(f"{path}: measure the questions first, the served answers are compared")
    return read_rows(path)[1]


def seeds_command(chosen: argparse.Namespace, words: list[str]) -> bool:
    inputs = inputs_of(chosen)
    count = chosen.conversations
    tasks = recalls(inputs.tokenizer, inputs.source, RECALL_LENGTH, count, chosen.seed)
    settings = {**inputs.settings, **served.SETTINGS, "recall_tokens": RECALL_LENGTH}
    settings["prefix_cache"] = True
    rows = Rows(chosen.work / "seeds.jsonl", settings)
    if not seeds.measure(inputs.model, inputs.tokenizer, tasks, rows, inputs.deadline):
        return False
    write(chosen, words, seeds.figures(rows.found), {**settings, "requests": len(tasks)})
    return True


def kvpress_command(chosen: argparse.Namespace, words: list[str]) -> bool:
    inputs = inputs_of(chosen)
    length = perplexity.PROMPT + perplexity.CONTINUATION
    texts = passages(inputs.dataset, inputs.tokenizer, chosen.texts, length, chosen.seed)
    asked = needles(
        inputs.tokenizer, inputs.source, LENGTHS[:1], DEPTHS, chosen.needles, chosen.seed
    )
    items = peer.items_of(texts, asked, inputs.tokenizer)
    settings = {
        **inputs.settings, **peer.SETTINGS,
        "prompt_tokens": perplexity.PROMPT, "continuation_tokens": perplexity.CONTINUATION,
    }  # fmt: skip
    rows = Rows(chosen.work / "kvpress.jsonl", settings)
    model = ReferenceModel.load(Path(inputs.model))
    finished = peer.measure_ours(model, items, rows, inputs.deadline) and peer.measure_theirs(
        chosen.kvpress_python, inputs.model, items, rows, inputs.deadline
    )
    if not finished:
        return False
    sizes = {
        "requests": len(items),
        "texts": chosen.texts,
        "needles": len(asked),
        "kvpress_versions": rows.found["kvpress/versions"],
    }
    write(chosen, words, peer.figures(rows.found, items), {**settings, **sizes})
    return True


def lookups_command(chosen: argparse.Namespace, words: list[str]) -> bool:
    """Rows hold a policy's answers whatever else was asked, so that policies may be added later."""
    read_figures(chosen.out)  # refused before an hour is spent on measuring, not after
    inputs = inputs_of(chosen)
    lengths = lookup_runs.LENGTHS[: chosen.lengths]
    tasks = lookups(inputs.tokenizer, inputs.source, lengths, chosen.rounds, chosen.seed)
    policies = chosen.policies.split(",")
    if unknown := set(policies) - set(policy_names()):
        raise FiguresError(f"--policies: unknown {', '.join(sorted(unknown))}")
    cells = grid(policies, lookup_runs.KEEPS)
    suffix = "unseen" if chosen.unseen else "seen"
    settings = {**inputs.settings, **lookup_runs.SETTINGS}
    rows = Rows(chosen.work / f"lookups_{suffix}.jsonl", settings)
    asked = (inputs.tokenizer, tasks, cells, rows, inputs.deadline)
    if chosen.unseen:
        model = ReferenceModel.load(Path(inputs.model))
        finished = lookup_runs.measure_reference(model, *asked, _end_tokens(model))
    else:
        finished = lookup_runs.measure_served(inputs.model, *asked)
    if not finished:
        return False
    settings |= {"served": not chosen.unseen, "lengths": lengths, "requests": len(tasks)}
    found = lookup_runs.figures(rows.found, tasks, cells, suffix)
    write(chosen, words, found, settings, topic="quality")
    return True


def lines_command(chosen: argparse.Namespace, words: list[str]) -> bool:
    write(chosen, words, lines_figure(), {})
    return True


def tables_command(chosen: argparse.Namespace, words: list[str]) -> bool:
    document = read_figures(chosen.out)
    if document is None:
        raise FiguresError(f"{chosen.out}: no such file")
    fill_file(chosen.doc, tables.tables(document))
    return True
