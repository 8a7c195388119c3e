"""Questions: the same from the same seed, the needle where it was put, answers scored strictly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import pytest
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.quality.commands import (
    DEPTHS,
    LENGTHS,
    RECALL_LENGTH,
    served_questions,
)
from vtoken_sglang_eval.quality.tasks import (
    FACTS,
    MARK,
    Task,
    needles,
    recalls,
    score,
    split_prompt,
)
from vtoken_sglang_eval.quality.text import filler, passages, sentences
from vtoken_sglang_eval.sharegpt import Conversation, Dataset

from tests.eval.builders import CharacterTokenizer

TOKENIZER = CharacterTokenizer()


def dataset(turns: Sequence[str], records: int = 1) -> Dataset:
    conversation = Conversation(
        conversation_id="a", user_turns=tuple("ask" for _ in turns), assistant_turns=tuple(turns)
    )
    return Dataset(
        conversations=(conversation,) * records,
        unusable=0,
        dropped_chars=0,
        name="some.json",
        size_bytes=1,
        sha256="",
    )


def endless(key: str = "") -> Iterator[str]:
    return (f"This is sentence {'x' * (1 + number % 7)} of the notes." for number in count())


def text_of(task: Task) -> str:
    return TOKENIZER.decode(task.prompt)


def test_needles_follow_from_the_seed() -> None:
    first, same, other = (
        needles(TOKENIZER, endless, (400, 900), (0.1, 0.9), 2, seed) for seed in (5, 5, 6)
    )
    assert first == same
    assert [task.answers for task in first] != [task.answers for task in other]
    assert len({task.name for task in first}) == len(first) == 8


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_the_needle_is_where_it_was_asked_for(depth: float) -> None:
    (task,) = needles(TOKENIZER, endless, (2000,), (depth,), 1, 0)
    text, (code,) = text_of(task), task.answers
    begin, end = text.index("This is"), text.rindex("of the notes.")
    assert text.count(code) == 1
    assert len(code) == 5
    if 0 < depth < 1:
        assert abs((text.index("Remember that") - begin) / (end - begin) - depth) < 0.05
    else:
        inside = begin < text.index("Remember that") < end
        assert not inside
    assert 1800 < len(text) < 2400


def test_the_question_is_the_second_part_and_leads_into_the_answer() -> None:
    (task,) = needles(TOKENIZER, endless, (400,), (0.5,), 1, 0)
    context, question = TOKENIZER.decode(task.context), TOKENIZER.decode(task.question)
    assert MARK not in context + question
    assert question.startswith("What is the access code of the ")
    assert question.endswith(" is")
    assert "<assistant>" in question
    assert task.answers[0] in context
    assert task.answers[0] not in question


def test_facts_are_told_in_turn_one_and_asked_in_turn_three() -> None:
    tasks = recalls(TOKENIZER, endless, 600, 2, 0)
    assert tasks == recalls(TOKENIZER, endless, 600, 2, 0)
    assert len(tasks) == 2 * len(FACTS)
    for task in tasks:
        turns = text_of(task).split("<user>")[1:]
        assert len(turns) == 3
        assert task.answers[0] in turns[0]
        assert task.answers[0] not in "".join(turns[1:])
        assert len(turns[1]) > 500
    histories = {tuple(task.context) for task in tasks}
    assert len(histories) == 2  # the questions of one conversation share it


def test_a_prompt_without_the_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="mark"):
        split_prompt(TOKENIZER, [{"role": "user", "content": "no"}], "")


@pytest.mark.parametrize(
    ("answers", "text", "expected"),
    [
        (("12345",), " 12345.", 1.0),
        (("12345",), " 112345", 0.0),
        (("12345",), "123456", 0.0),
        (("Lisbon",), "You live in lisbon!", 1.0),
        (("goat",), "goats", 0.0),
        (("1", "2", "3", "4"), "1 and 3", 0.5),
        (("a+b",), "x a+b y", 1.0),
    ],
)
def test_score(answers: tuple[str, ...], text: str, expected: float) -> None:
    task = Task(kind="needle", name="", context=[], question=[], answers=answers, answer_tokens=1)
    assert score(task, text) == expected


def test_sentences_are_plain_and_hold_no_number() -> None:
    text = "Short. This one is a plain sentence of words. It has 3 numbers in it, no good. "
    text += "Nor does one without an end count here:\n\nAnd this is\nsplit over two lines."
    found = list(sentences(dataset([text]), "a"))
    assert found[0] == "This one is a plain sentence of words."
    assert found[1].endswith("And this is split over two lines.")
    assert len(found) == 2


def test_filler_goes_on_where_it_ended_and_stays_within_its_length() -> None:
    source = endless()
    first, sizes = filler(source, TOKENIZER, 200)
    second, _ = filler(source, TOKENIZER, 200)
    assert 120 < sum(sizes) <= 200
    assert not set(first[-1:]) & set(second[:1])
    with pytest.raises(DatasetError, match="ended after"):
        filler(iter(["A few words only here."]), TOKENIZER, 200)


def test_passages_are_whole_beginnings() -> None:
    data = dataset(["word " * 200, "more " * 200], records=3)
    found = passages(data, TOKENIZER, 2, 500, 0)
    assert [len(passage) for passage in found] == [500, 500]
    assert TOKENIZER.decode(found[0]).startswith("<user>ask</><assistant>word")
    with pytest.raises(DatasetError, match="fewer than 4"):
        passages(data, TOKENIZER, 4, 500, 0)
    with pytest.raises(DatasetError, match="fewer than 1"):
        passages(dataset(["one answer only " * 100]), TOKENIZER, 1, 500, 0)


def test_what_is_served_was_asked_of_the_reference_at_every_size() -> None:
    served = served_questions(TOKENIZER, endless, 3)
    asked = [
        *needles(TOKENIZER, endless, LENGTHS[:1], DEPTHS, 1, 3),
        *recalls(TOKENIZER, endless, RECALL_LENGTH, 1, 3),
    ]
    assert len(served) == len(DEPTHS) + 2
    assert all(task in asked for task in served)
