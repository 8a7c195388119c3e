"""The workloads: fixed by the seed, sharing as asked, lengths exact, data replayed as they are."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.chat import clip_tokens, first_prompt, next_turn
from vtoken_sglang_eval.errors import ConfigError, DatasetError
from vtoken_sglang_eval.options import WORKLOADS, Options
from vtoken_sglang_eval.sharegpt import Conversation, Dataset
from vtoken_sglang_eval.sources import load_source
from vtoken_sglang_eval.workloads.base import Session, Workload
from vtoken_sglang_eval.workloads.build import build_workload
from vtoken_sglang_eval.workloads.documents import documents_of_records, plant_facts
from vtoken_sglang_eval.workloads.reasoning import make_puzzle

from tests.eval.builders import CharacterTokenizer

TOKENIZER = CharacterTokenizer()
BASE = Options(
    model="tiny", workload="multi_turn", conversations=4, turns=2, system_tokens=400,
    user_tokens=60, out_tokens=8, seed=3, sharing=2,
)  # fmt: skip
TEXT = "One sentence follows another. " * 200


def conversations(count: int = 20, turns: int = 4) -> Dataset:
    talks = tuple(
        Conversation(
            conversation_id=f"c{number}",
            user_turns=tuple(f"question {turn} of talk {number}, please" for turn in range(turns)),
            assistant_turns=(f"answer of talk {number}. " * 4,),
        )
        for number in range(count)
    )
    return Dataset(
        conversations=talks, unusable=0, dropped_chars=0, name="talk.json", size_bytes=1,
        sha256="00",
    )  # fmt: skip


def source(workload: str, tmp_path: Path, **changes: Any) -> tuple[Options, Dataset]:
    """Options of the workload and what it reads."""
    options = replace(BASE, workload=workload, **changes)
    if workload == "document_questions":
        path = tmp_path / "book.txt"
        path.write_text(TEXT)
        options = replace(options, dataset=str(path))
    if workload == "multi_turn":
        return options, conversations()
    return options, load_source(options)


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return len(os.path.commonprefix([left, right]))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_every_workload_follows_from_its_settings(name: str, tmp_path: Path) -> None:
    options, data = source(name, tmp_path)
    built = build_workload(options, data, TOKENIZER)
    assert built.name == name
    assert built == build_workload(options, data, TOKENIZER)
    assert len(built.sessions) == options.conversations
    other = build_workload(replace(options, seed=4, out_tokens=9), data, TOKENIZER)
    assert built.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("name", ["multi_turn", "document_questions", "agent", "reasoning"])
def test_sessions_share_a_prefix_within_their_group_only(name: str, tmp_path: Path) -> None:
    options, data = source(name, tmp_path)
    prompts = [s.first_prompt for s in build_workload(options, data, TOKENIZER).sessions]
    assert common(prompts[0], prompts[1]) >= 0.9 * options.system_tokens
    assert common(prompts[2], prompts[3]) >= 0.9 * options.system_tokens
    assert common(prompts[0], prompts[2]) < 0.7 * options.system_tokens


def test_one_document_for_all_when_sharing_is_zero(tmp_path: Path) -> None:
    options, data = source("document_questions", tmp_path, sharing=0)
    built = build_workload(options, data, TOKENIZER)
    assert built.facts["documents"] == 1
    expected = [answers for s in built.sessions for answers in s.expected]
    assert len({answers[0] for answers in expected}) == options.conversations * options.turns
    text = TOKENIZER.decode(built.sessions[0].first_prompt)
    assert all(answers[0] in text for answers in expected)


def test_planted_facts_leave_the_text_whole() -> None:
    document = plant_facts(TEXT, 3, random.Random(1))
    left = document.text
    for question in document.questions:
        place = question.text.split("of the ")[1].split("?")[0]
        fact = f" The access code of the {place} is {question.answers[0]}. "
        assert left.count(fact) == 1
        left = left.replace(fact, "")
    assert left == TEXT


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    options, data = source("document_questions", tmp_path, system_tokens=4000)
    with pytest.raises(DatasetError, match="too short for 2 documents of 4000 tokens"):
        build_workload(options, data, TOKENIZER)


def test_longbench_records_become_documents_with_questions(tmp_path: Path) -> None:
    records = [
        {"context": "A long text. " * 50, "input": f"What is {n}?", "answers": [f"answer {n}"]}
        for n in range(4)
    ]
    unscorable = [
        {"context": "x", "input": "y?", "answers": answers}
        for answers in (None, {"text": ["z"], "answer_start": [0]}, [1], 5)
    ]
    (document,) = documents_of_records([*records, {"context": 3}, "noise", *unscorable])
    assert [question.answers for question in document.questions] == [
        (f"answer {n}",) for n in range(4)
    ]
    path = tmp_path / "longbench.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    options = replace(
        BASE, workload="document_questions", dataset=str(path), turns=1, sharing=4,
        system_tokens=300,
    )  # fmt: skip
    built = build_workload(options, load_source(options), TOKENIZER)
    assert built.sessions[2].expected == (("answer 2",),)
    assert "What is 2?" in TOKENIZER.decode(built.sessions[2].first_prompt)


def test_a_puzzle_has_the_result_it_claims() -> None:
    for seed in range(20):
        text, result = make_puzzle(random.Random(seed))
        numbers = [int(word) for word in text.replace(".", "").split() if word.isdigit()]
        boxes, each, lost = numbers
        assert result == boxes * each - lost - boxes // 2


def test_answers_end_with_their_workload(tmp_path: Path) -> None:
    built: Workload = build_workload(*source("reasoning", tmp_path), TOKENIZER)
    assert all(session.turns == 1 for session in built.sessions)
    assert all(len(session.expected[0]) == 1 for session in built.sessions)


def test_the_system_prompt_holds_nothing_of_a_session() -> None:
    options = replace(BASE, sharing=0, turns=3, system_tokens=120)
    workload = build_workload(options, conversations(), TOKENIZER)
    texts = [TOKENIZER.decode(session.first_prompt) for session in workload.sessions]
    (system,) = {text.partition("</>")[0] for text in texts}
    assert workload.facts["system_prompt_tokens"] == len(system) - len("<system>")
    assert abs(len(system) - len("<system>") - 120) <= 2
    for text in texts:
        talk = text.partition("of talk ")[2]
        assert f"answer of talk {talk.split('<')[0]}." not in system


def test_lanes_and_lengths() -> None:
    workload = build_workload(BASE, conversations(), TOKENIZER)
    assert [session.lane for session in workload.over(2).sessions] == [0, 1, 0, 1]
    assert [session.lane for session in workload.over(0).sessions] == [0, 1, 2, 3]
    answers = [length for session in workload.sessions for length in session.answer_tokens]
    assert all(4 <= length <= 12 for length in answers)
    assert workload.output_tokens() == sum(answers)


def test_prompt_lengths_count_earlier_answers() -> None:
    session = Session(
        session=0, first_prompt=(1,) * 10, later_turns=((2,) * 3, (3,) * 4), answer_tokens=(5, 6, 7)
    )
    assert session.prompt_lengths() == [10, 18, 28]
    assert session.total_tokens() == 35


def test_sessions_that_do_not_fit_are_left_out_and_counted() -> None:
    sessions = tuple(
        Session(session=at, first_prompt=(1,) * 10 * (at + 1), answer_tokens=(5,))
        for at in range(3)
    )
    workload = Workload(name="data", sessions=sessions)
    fitting = workload.that_fits(25)
    assert [s.total_tokens() for s in fitting.sessions] == [15, 25]
    assert fitting.facts == {"left_out_longer_than_25": 1}
    assert workload.that_fits(35) is workload
    with pytest.raises(DatasetError, match="every session is longer than the server takes"):
        workload.that_fits(14)


def test_a_session_needs_one_answer_length_per_turn() -> None:
    with pytest.raises(ConfigError, match="one length per turn"):
        Session(session=0, first_prompt=(1,), later_turns=((2,),), answer_tokens=(5,))


def test_turns_put_together_are_the_rendered_conversation() -> None:
    opening = first_prompt(TOKENIZER, "be kind", "hello")
    later = next_turn(TOKENIZER, "be kind", "and now?")
    answer = TOKENIZER.encode("hi")
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and now?"},
    ]
    assert [*opening, *answer, *later] == TOKENIZER.encode(TOKENIZER.render(messages))


def test_a_template_that_drops_answers_is_refused() -> None:
    class Forgetful(CharacterTokenizer):
        def render(self, messages: object) -> str:
            return "<assistant>"

    with pytest.raises(ConfigError, match="repeat earlier answers"):
        next_turn(Forgetful(), "be kind", "and now?")


def test_clipping_keeps_short_text_and_cuts_long_text() -> None:
    assert clip_tokens(TOKENIZER, "short", 10) == "short"
    assert clip_tokens(TOKENIZER, "x" * 1000, 10) == "x" * 10


def test_too_few_conversations_are_refused() -> None:
    with pytest.raises(DatasetError, match="3 conversations have 3 user turns, 4 are needed"):
        build_workload(replace(BASE, turns=3), conversations(count=3), TOKENIZER)


def test_too_little_text_for_the_system_prompt_is_refused() -> None:
    with pytest.raises(DatasetError, match="Lower --system-tokens"):
        build_workload(replace(BASE, system_tokens=4000), conversations(), TOKENIZER)
