"""Long documents with questions, from free text, LongBench-format records, or conversations.

Free text and conversations carry no questions of their own, so facts are planted: short sentences
at even depths ("The access code of the harbour is 48213."), each with a question whose answer is
exactly the number. A model that attends to the sentence can answer; one whose policy evicted it
cannot, so the share of right answers is a quality figure that needs no judge.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vtoken_sglang_eval.chat import ChatTokenizer
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.sharegpt import Conversation

PLACES = (
    "harbour", "library", "observatory", "bakery", "museum", "station", "orchard", "workshop",
    "lighthouse", "theatre", "hospital", "airport", "brewery", "castle", "garage", "nursery",
    "quarry", "sawmill", "stadium", "tannery", "vineyard", "warehouse", "winery", "zoo",
    "archive", "barracks", "chapel", "dairy", "embassy", "foundry", "greenhouse", "hangar",
)  # fmt: skip
FACT = "The access code of the {place} is {code}."
QUESTION = "What is the access code of the {place}? Answer with the number only."
CHARACTERS_PER_TOKEN = 16  # no token of the tokenizers at hand stands for more, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and the answers that count as right (any of them, letter case ignored)."""

    text: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text and what can be asked about it; no questions means that facts are planted."""

    text: str
    questions: tuple[Question, ...] = ()


def documents_of_records(records: Sequence[Any]) -> tuple[Document, ...]:
    """Documents of LongBench-format records: `context`, `input`, `answers`; others are left out.

    Questions about the same context are put together, in their order.
    """
    asked: dict[str, list[Question]] = {}
    for record in records:
        if not isinstance(record, dict) or not isinstance(record.get("context"), str):
            continue
        answers = record.get("answers", [])
        answers = [answers] if isinstance(answers, str) else answers
        if not isinstance(answers, list) or not all(isinstance(a, str) for a in answers):
            continue
        question = record.get("input") or record.get("question") or ""
        if record["context"].strip() and question:
            asked.setdefault(record["context"], []).append(
                Question(text=str(question), answers=tuple(answers))
            )
    return tuple(Document(text=text, questions=tuple(qs)) for text, qs in asked.items())


def conversation_texts(conversations: Sequence[Conversation]) -> Iterator[str]:
    """The longest answer of every conversation: real prose where no document is at hand."""
    for entry in conversations:
        if entry.assistant_turns:
            yield max(entry.assistant_turns, key=len)


def cut_documents(
    texts: Iterator[str], count: int, tokens: int, tokenizer: ChatTokenizer
) -> list[str]:
    """`count` documents of about `tokens` tokens: texts joined until long enough, then cut.

    A long text gives several documents. The rest of a text that was cut is used by the next one.

    Raises:
        DatasetError: the texts are too short for that many.
    """
    made: list[str] = []
    pending = ""
    while len(made) < count:
        ids = tokenizer.encode(pending[: tokens * CHARACTERS_PER_TOKEN])
        if len(ids) >= tokens:
            document = tokenizer.decode(ids[:tokens])
            made.append(document)
            pending = pending[len(document) :]
            continue
        following = next(texts, None)
        if following is None:
            raise DatasetError(
                f"the text is too short for {count} documents of {tokens} tokens "
                f"({len(made)} could be made). Lower --system-tokens, or --conversations, "
                "or raise --sharing"
            )
        pending += ("\n\n" if pending else "") + following
    return made


def plant_facts(text: str, count: int, generator: random.Random) -> Document:
    """The text with `count` facts at even depths, each between two of its sentences or lines.

    Raises:
        DatasetError: more facts are asked for than there are names.
    """
    if count > len(PLACES):
        raise DatasetError(
            f"at most {len(PLACES)} questions can be asked about one document, {count} are needed. "
            "Lower --sharing or --turns"
        )
    facts = [
        (place, str(generator.randrange(10_000, 100_000)))
        for place in generator.sample(PLACES, count)
    ]
    parts, begin = [], 0
    for number, (place, code) in enumerate(facts, start=1):
        end = _boundary(text, begin, len(text) * number // (count + 1))
        parts += [text[begin:end], " " + FACT.format(place=place, code=code) + " "]
        begin = end
    parts.append(text[begin:])
    questions = tuple(
        Question(text=QUESTION.format(place=place), answers=(code,)) for place, code in facts
    )
    return Document(text="".join(parts), questions=questions)


def _boundary(text: str, begin: int, at: int) -> int:
    """The end of the sentence or word before `at`, not before `begin`."""
    for mark in (". ", "\n", " "):
        found = text.rfind(mark, begin, at)
        if found > begin:
            return found + len(mark)
    return at
