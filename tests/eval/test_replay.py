"""Data replayed as they are: traces, conversations, documents; files in no known format."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.sources import load_source
from vtoken_sglang_eval.workloads.base import Workload
from vtoken_sglang_eval.workloads.build import build_workload
from vtoken_sglang_eval.workloads.trace import BLOCK_TOKENS, parse_trace

from tests.eval.builders import CharacterTokenizer
from tests.eval.test_workloads import common

TOKENIZER = CharacterTokenizer()
TRACE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 60, "hash_ids": [7, 8, 9]},
    {"timestamp": 500, "input_length": 900, "output_length": 40, "hash_ids": [7, 8]},
    {"timestamp": 250, "input_length": 700, "output_length": 20, "hash_ids": [5, 6]},
    {"timestamp": 900, "input_length": 512, "output_length": 1, "hash_ids": [7]},
]


def write_lines(path: Path, records: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


def built_from(tmp_path: Path, records: list[Any], **changes: Any) -> Workload:
    """The records of a file, replayed."""
    options = Options(dataset=write_lines(tmp_path / "data.jsonl", records), as_is=True, **changes)
    return build_workload(options, load_source(options), TOKENIZER)


def replayed_trace(tmp_path: Path, **changes: Any) -> Workload:
    options = Options(trace=write_lines(tmp_path / "trace.jsonl", TRACE), **changes)
    return build_workload(options, load_source(options), TOKENIZER)


def test_a_trace_is_replayed_with_exactly_its_sharing(tmp_path: Path) -> None:
    scale = 0.05
    built = replayed_trace(tmp_path, length_scale=scale, time_scale=2.0)
    block = round(BLOCK_TOKENS * scale)
    assert built.timed
    assert [session.arrival_s for session in built.sessions] == [0.0, 0.5, 1.0, 1.8]
    prompts = [session.first_prompt for session in built.sessions]
    assert [len(prompt) for prompt in prompts] == [55, 35, 45, 26]
    assert [session.answer_tokens for session in built.sessions] == [(3,), (1,), (2,), (1,)]
    assert common(prompts[0], prompts[2]) == 45  # ids 7, 8: the whole of the shorter prompt
    assert common(prompts[0], prompts[3]) == block
    assert common(prompts[0], prompts[1]) < block
    assert built.facts["blocks_seen_before"] == 3
    assert built.over(2) == built  # its times decide, not a number of lanes


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hash_ids": [1]}, r"line 1: hash_ids must hold an id per 512 prompt tokens \(3\), got 1"),
        ({"hash_ids": "x"}, "hash_ids must be a list"),
        ({"input_length": 0}, "input_length must be a number of at least 1, got 0"),
        ({"timestamp": None}, "timestamp must be a number"),
        ({"output_length": True}, "output_length must be a number"),
    ],
)
def test_a_wrong_trace_line_is_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(DatasetError, match=match):
        parse_trace([{**TRACE[0], **change}])


def test_a_cut_off_trace_says_how_much_was_lost(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = "\n".join(map(json.dumps, TRACE))
    path.write_text(lines[:-20])
    found = load_source(Options(trace=str(path)))
    assert len(found.trace) == 3
    assert found.dropped_chars == len(json.dumps(TRACE[-1])) - 20


def test_shipped_samples_go_by_name() -> None:
    assert len(load_source(Options(trace="sample:trace.jsonl")).trace) == 12
    assert load_source(Options(dataset="sample:conversations.json")).conversations
    assert load_source(Options(dataset="sample:documents.jsonl")).documents
    with pytest.raises(DatasetError, match="sample:absent"):
        load_source(Options(dataset="sample:absent"))


@pytest.mark.parametrize("flag", ["trace", "dataset"])
@pytest.mark.parametrize("content", ["prose", '{"some": "thing"}', "[]"])
def test_a_file_in_no_known_format_is_refused(tmp_path: Path, flag: str, content: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(DatasetError) as caught:
        load_source(Options(**{flag: str(path)}))
    assert "\n" not in str(caught.value)
    with pytest.raises(DatasetError, match="No such file"):
        load_source(Options(**{flag: str(tmp_path / "none")}))


def test_a_trace_given_as_data_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="pass it with --trace"):
        load_source(Options(dataset=write_lines(tmp_path / "trace.jsonl", TRACE)))


TALK = [
    ("system", "be kind"), ("user", "hello"), ("user", "are you there?"),
    ("assistant", "yes, here"), ("user", "good"),
]  # fmt: skip


def test_conversations_are_replayed_turn_by_turn(tmp_path: Path) -> None:
    openai = {"messages": [{"role": role, "content": text} for role, text in TALK]}
    parts = [{"type": "text", "text": "bye"}]
    batch = {"body": {"messages": [{"role": "user", "content": parts}], "max_tokens": 5}}
    built = built_from(tmp_path, [openai, batch])
    first, second = built.sessions
    said = TOKENIZER.render(
        [{"role": "system", "content": "be kind"},
         {"role": "user", "content": "hello\n\nare you there?"}]
    )  # fmt: skip
    assert TOKENIZER.decode(first.first_prompt) == said
    assert TOKENIZER.decode(first.later_turns[0]) == "</><user>good</><assistant>"
    assert first.answer_tokens == (len("yes, here"), 64)  # the last answer is not in the data
    assert TOKENIZER.decode(second.first_prompt) == "<user>bye</><assistant>"
    assert second.answer_tokens == (5,)


def test_sharegpt_answers_keep_their_lengths_and_order(tmp_path: Path) -> None:
    def record(number: int) -> dict[str, Any]:
        turns = [("gpt", "early"), ("human", f"question {number}"), ("gpt", "a" * (number + 1))]
        return {"conversations": [{"from": who, "value": text} for who, text in turns]}

    built = built_from(tmp_path, [record(number) for number in range(5)], conversations=3)
    assert [session.answer_tokens for session in built.sessions] == [(1,), (2,), (3,)]
    assert "question 2" in TOKENIZER.decode(built.sessions[2].first_prompt)


def test_records_about_one_text_share_it_and_are_scored(tmp_path: Path) -> None:
    text = "A long text. " * 50
    records = [{"context": text, "input": f"What is {n}?", "answers": [f"{n}"]} for n in range(2)]
    built = built_from(tmp_path, records)
    assert [session.expected for session in built.sessions] == [(("0",),), (("1",),)]
    assert common(*(session.first_prompt for session in built.sessions)) > len(text)


def test_shapes_only_cut_what_is_replayed(tmp_path: Path) -> None:
    openai = {"messages": [{"role": role, "content": text} for role, text in TALK]}
    (session,) = built_from(tmp_path, [openai], turns=1, user_tokens=4, out_tokens=2).sessions
    assert session.turns == 1
    assert session.answer_tokens == (2,)
    assert TOKENIZER.decode(session.first_prompt).endswith("<user>hell</><assistant>")


def test_a_data_set_by_name_is_read_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_rows(path: str, name: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((path, name, split))
        if path == "nobody/nothing":
            raise ConnectionError("no route to it\nand a long story")
        return [{"context": "Text. " * 90, "input": "Who?", "answers": ["Ada"]}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_rows))
    options = Options(dataset="hf:owner/bench/part:train")
    (document,) = load_source(options).documents
    assert document.questions[0].answers == ("Ada",)
    assert asked == [("owner/bench", "part", "train")]
    with pytest.raises(
        DatasetError, match=r"hf:nobody/nothing cannot be loaded \(no route to it\)"
    ):
        load_source(Options(dataset="hf:nobody/nothing"))
    assert asked[-1] == ("nobody/nothing", None, "test")
