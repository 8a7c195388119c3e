"""The multi-turn workload: fixed by the seed, shared prefix, exact lengths, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vtoken_sglang_eval.chat import clip_tokens, first_prompt, next_turn
from vtoken_sglang_eval.config import EvalConfig
from vtoken_sglang_eval.errors import ConfigError, DatasetError
from vtoken_sglang_eval.multi_turn import answer_range
from vtoken_sglang_eval.sharegpt import Conversation, Dataset
from vtoken_sglang_eval.workload import Session, build_workload

from tests.eval.builders import CharacterTokenizer

TOKENIZER = CharacterTokenizer()
CONFIG = EvalConfig(
    model="tiny", conversations=4, turns=3, concurrency=2, system_tokens=120, user_tokens=20,
    out_tokens=8, seed=3,
)  # fmt: skip


def dataset(count: int = 20, turns: int = 4) -> Dataset:
    conversations = tuple(
        Conversation(
            conversation_id=f"c{number}",
            user_turns=tuple(f"question {turn} of talk {number}, please" for turn in range(turns)),
            assistant_turns=(f"answer of talk {number}. " * 4,),
        )
        for number in range(count)
    )
    return Dataset(
        conversations=conversations, unusable=0, dropped_chars=0, name="talk.json", size_bytes=1,
        sha256="00",
    )  # fmt: skip


def test_the_same_seed_gives_the_same_requests() -> None:
    first = build_workload(CONFIG, dataset(), TOKENIZER)
    again = build_workload(CONFIG, dataset(), TOKENIZER)
    assert first == again
    assert first.fingerprint() == again.fingerprint()


@pytest.mark.parametrize("change", [{"seed": 4}, {"out_tokens": 9}, {"user_tokens": 10}])
def test_other_settings_give_another_fingerprint(change: dict[str, int]) -> None:
    base = build_workload(CONFIG, dataset(), TOKENIZER)
    other = build_workload(replace(CONFIG, **change), dataset(), TOKENIZER)
    assert base.fingerprint() != other.fingerprint()


def test_sessions_share_the_system_prompt_and_nothing_of_it_is_a_session() -> None:
    workload = build_workload(CONFIG, dataset(), TOKENIZER)
    texts = [TOKENIZER.decode(session.first_prompt) for session in workload.sessions]
    systems = {text.partition("</>")[0] for text in texts}
    assert len(systems) == 1
    system = systems.pop()
    assert workload.facts["system_prompt_tokens"] == len(system) - len("<system>")
    assert abs(len(system) - len("<system>") - CONFIG.system_tokens) <= 2
    for text in texts:
        talk = text.partition("of talk ")[2]
        assert f"answer of talk {talk.split('<')[0]}." not in system


def test_lanes_and_lengths() -> None:
    workload = build_workload(CONFIG, dataset(), TOKENIZER)
    assert [session.lane for session in workload.sessions] == [0, 1, 0, 1]
    assert workload.requests == CONFIG.conversations * CONFIG.turns
    shortest, longest = answer_range(CONFIG.out_tokens)
    answers = [length for session in workload.sessions for length in session.answer_tokens]
    assert all(shortest <= length <= longest for length in answers)
    assert workload.output_tokens() == sum(answers)


def test_prompt_lengths_count_earlier_answers() -> None:
    session = Session(
        session=0, lane=0, first_prompt=(1,) * 10, later_turns=((2,) * 3, (3,) * 4),
        answer_tokens=(5, 6, 7),
    )  # fmt: skip
    assert session.prompt_lengths() == [10, 18, 28]
    assert session.total_tokens() == 35


def test_a_session_needs_one_answer_length_per_turn() -> None:
    with pytest.raises(ConfigError, match="one length per turn"):
        Session(session=0, lane=0, first_prompt=(1,), later_turns=((2,),), answer_tokens=(5,))


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
        build_workload(CONFIG, dataset(count=3), TOKENIZER)


def test_too_little_text_for_the_system_prompt_is_refused() -> None:
    with pytest.raises(DatasetError, match="Lower --system-tokens"):
        build_workload(replace(CONFIG, system_tokens=4000), dataset(), TOKENIZER)


def test_a_session_longer_than_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool: must hold the longest session"):
        build_workload(replace(CONFIG, pool=160), dataset(), TOKENIZER)


def test_an_unknown_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match="workload: must be among multi_turn, .* got 'chess'"):
        build_workload(replace(CONFIG, workload="chess"), dataset(), TOKENIZER)
