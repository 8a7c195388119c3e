"""Questions with one right answer over real text: needles, and facts told two turns earlier.

Everything follows from the seed. A prompt comes in two parts, so that a policy can decide before
or after it has seen the question.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from vtoken_sglang_eval.chat import ChatTokenizer, Message

from .text import filler

# Key -> sentences of text around a question: the same for a key whatever else is asked.
Source = Callable[[str], Iterator[str]]
MARK = "VTOKENQUESTIONMARK"
THINGS = ("lantern", "harbour", "orchard", "violin", "glacier", "compass", "meadow", "anchor")
COLOURS = ("amber", "crimson", "violet", "silver", "olive", "scarlet", "turquoise", "ivory")
NAMES = ("Amelia", "Bruno", "Clara", "Dmitri", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas")
FACTS = (
    ("name", "My name is {}.", "What is my name?", "Your name is"),
    ("sister", "My sister is called {}.", "What is my sister called?", "Your sister is called"),
    ("locker", "The code of my locker is {}.", "What is the code of my locker?",
     "The code of your locker is"),
    ("flight", "My flight has the number {}.", "What number does my flight have?",
     "Your flight has the number"),
)  # fmt: skip
NUMBERED = ("locker", "flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question.

    Fields:
        kind: needle, recall, ruler, or one of `lookups.KINDS`. name: unique within the kind.
        context, question: token ids; the prompt is one after the other.
        answers: what the generated text must hold, every one of them.
        answer_tokens: longest answer asked for.
        facts: numbers and words to group results by (length, depth, ...).
        lead: words the answer begins with that are not in the prompt.
    """

    kind: str
    name: str
    context: list[int]
    question: list[int]
    answers: tuple[str, ...]
    answer_tokens: int
    facts: dict[str, Any] = field(default_factory=dict)
    lead: str = ""

    @property
    def prompt(self) -> list[int]:
        return [*self.context, *self.question]


def score(task: Task, text: str) -> float:
    """Share of the answers that stand in `text` as whole words or numbers, upper case ignored."""
    found = [
        re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None
        for answer in task.answers
    ]
    return sum(found) / len(found)


def split_prompt(
    tokenizer: ChatTokenizer, messages: Sequence[Message], lead: str
) -> tuple[list[int], list[int]]:
    """Ids before and after MARK in the rendered chat, which ends in the answer's first words."""
    before, mark, after = (tokenizer.render(messages) + lead).partition(MARK)
    if not mark:
        raise ValueError("messages: one must hold the mark where the question begins")
    return tokenizer.encode(before), tokenizer.encode(after)


def needles(
    tokenizer: ChatTokenizer,
    source: Source,
    lengths: Sequence[int],
    depths: Sequence[float],
    repeats: int,
    seed: int,
) -> list[Task]:
    """A five-digit code stated once in unrelated text, at every length and depth.

    Args:
        source: the text around it.
        lengths: tokens of that text. depths: where in it, 0 = start, 1 = end.
    """
    tasks = []
    for repeat in range(repeats):
        for length in lengths:
            for depth in depths:
                key = f"needle {seed} {repeat} {length} {depth:g}"
                random = Random(key)
                thing = f"{random.choice(COLOURS)} {random.choice(THINGS)}"
                code = str(random.randrange(10000, 100000))
                texts, sizes = filler(source(key), tokenizer, length)
                at, passed = 0, 0
                while at < len(texts) and passed + sizes[at] / 2 < depth * sum(sizes):
                    passed += sizes[at]
                    at += 1
                texts.insert(at, f"Remember that the access code of the {thing} is {code}.")
                content = (
                    "Read the notes below. One of them states an access code.\n\n"
                    f"{' '.join(texts)}\n\n{MARK}What is the access code of the {thing}?"
                )
                context, question = split_prompt(
                    tokenizer,
                    [{"role": "user", "content": content}],
                    f"The access code of the {thing} is",
                )
                tasks.append(
                    Task(
                        kind="needle",
                        name=f"{length}_{depth:g}_{repeat}",
                        context=context,
                        question=question,
                        answers=(code,),
                        answer_tokens=10,
                        facts={"length": length, "depth": depth},
                    )
                )
    return tasks


def recalls(
    tokenizer: ChatTokenizer, source: Source, length: int, conversations: int, seed: int
) -> list[Task]:
    """Four facts told in turn 1, other matters in turn 2, one fact asked in turn 3.

    The answers of the first two turns are given, not generated, so that every policy has the same
    history. `length` is the text of turn 2 in tokens.
    """
    tasks = []
    for number in range(conversations):
        key = f"recall {seed} {number}"
        random = Random(key)
        names = iter(random.sample(NAMES, len(FACTS)))
        told = {
            name: str(random.randrange(1000, 10000)) if name in NUMBERED else next(names)
            for name, *_ in FACTS
        }
        texts, _ = filler(source(key), tokenizer, length)
        half = len(texts) // 2
        introduction = " ".join(statement.format(told[name]) for name, statement, *_ in FACTS)
        history = [
            {"role": "user", "content": f"Hello! {introduction} Please remember all of this."},
            {"role": "assistant", "content": "Nice to meet you. I will remember it."},
            {"role": "user", "content": " ".join(texts[:half])},
            {"role": "assistant", "content": " ".join(texts[half:])},
        ]
        for name, _, question, lead in FACTS:
            asked = {"role": "user", "content": f"Thank you. {MARK}{question}"}
            before, after = split_prompt(tokenizer, [*history, asked], lead)
            tasks.append(
                Task(
                    kind="recall",
                    name=f"{number}_{name}",
                    context=before,
                    question=after,
                    answers=(told[name],),
                    answer_tokens=10,
                    facts={"fact": name},
                )
            )
    return tasks
