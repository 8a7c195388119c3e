"""The other workloads: fixed by the seed, sharing as asked, lengths exact, refusals by name."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vtoken_sglang_eval.config import EvalConfig
from vtoken_sglang_eval.documents import documents_of_records, plant_facts
from vtoken_sglang_eval.errors import ConfigError, DatasetError
from vtoken_sglang_eval.mooncake import BLOCK_TOKENS, parse_trace
from vtoken_sglang_eval.reasoning import make_puzzle
from vtoken_sglang_eval.sharegpt import Dataset
from vtoken_sglang_eval.sources import GENERATED, load_source
from vtoken_sglang_eval.workload import Workload, build_workload, workload_builders

from tests.eval.builders import CharacterTokenizer
from tests.eval.test_workload import dataset as conversations

TOKENIZER = CharacterTokenizer()
BASE = EvalConfig(
    model="tiny", conversations=4, turns=2, concurrency=2, system_tokens=400, user_tokens=60,
    out_tokens=8, seed=3, sharing=2, pool=16384,
)  # fmt: skip
TEXT = "One sentence follows another. " * 200


def source(workload: str, tmp_path: Path, **changes: Any) -> tuple[EvalConfig, Dataset]:
    """A configuration of the workload and what it reads."""
    config = replace(BASE, workload=workload, **changes)
    if workload == "mooncake":
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(map(json.dumps, TRACE)))
        config = replace(config, dataset=str(path), length_scale=0.05)
    if workload == "document_questions":
        path = tmp_path / "book.txt"
        path.write_text(TEXT)
        config = replace(config, dataset=str(path))
    if workload == "multi_turn":
        return config, conversations()
    return config, load_source(config)


def test_shipped_samples_go_by_name() -> None:
    config = replace(BASE, workload="mooncake", dataset="sample:trace.jsonl", length_scale=0.05)
    assert len(load_source(config).trace) == 12
    with pytest.raises(DatasetError, match="sample:absent"):
        load_source(replace(config, dataset="sample:absent"))
    talk = replace(BASE, workload="multi_turn", dataset="sample:conversations.json")
    assert load_source(talk).conversations
    with pytest.raises(DatasetError, match="sample:absent"):
        load_source(replace(talk, dataset="sample:absent"))


TRACE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 60, "hash_ids": [7, 8, 9]},
    {"timestamp": 500, "input_length": 900, "output_length": 40, "hash_ids": [7, 8]},
    {"timestamp": 250, "input_length": 700, "output_length": 20, "hash_ids": [5, 6]},
    {"timestamp": 900, "input_length": 512, "output_length": 1, "hash_ids": [7]},
]


def common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return len(os.path.commonprefix([left, right]))


@pytest.mark.parametrize("name", sorted(workload_builders()))
def test_every_workload_follows_from_its_settings(name: str, tmp_path: Path) -> None:
    config, data = source(name, tmp_path)
    built = build_workload(config, data, TOKENIZER)
    assert built.name == name
    assert built == build_workload(config, data, TOKENIZER)
    assert len(built.sessions) == config.conversations
    other = build_workload(replace(config, seed=4, out_tokens=9), data, TOKENIZER)
    if name != "mooncake":  # a trace leaves nothing to draw
        assert built.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("name", ["multi_turn", "document_questions", "agent", "reasoning"])
def test_sessions_share_a_prefix_within_their_group_only(name: str, tmp_path: Path) -> None:
    config, data = source(name, tmp_path)
    prompts = [s.first_prompt for s in build_workload(config, data, TOKENIZER).sessions]
    assert common(prompts[0], prompts[1]) >= 0.9 * config.system_tokens
    assert common(prompts[2], prompts[3]) >= 0.9 * config.system_tokens
    assert common(prompts[0], prompts[2]) < 0.7 * config.system_tokens


def test_one_document_for_all_when_sharing_is_zero(tmp_path: Path) -> None:
    config, data = source("document_questions", tmp_path, sharing=0)
    built = build_workload(config, data, TOKENIZER)
    assert built.facts["documents"] == 1
    expected = [answers for s in built.sessions for answers in s.expected]
    assert len({answers[0] for answers in expected}) == config.conversations * config.turns
    text = TOKENIZER.decode(built.sessions[0].first_prompt)
    assert all(answers[0] in text for answers in expected)


def test_planted_facts_leave_the_text_whole() -> None:
    import random

    document = plant_facts(TEXT, 3, random.Random(1))
    left = document.text
    for question in document.questions:
        place = question.text.split("of the ")[1].split("?")[0]
        fact = f" The access code of the {place} is {question.answers[0]}. "
        assert left.count(fact) == 1
        left = left.replace(fact, "")
    assert left == TEXT


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    config, data = source("document_questions", tmp_path, system_tokens=4000)
    with pytest.raises(DatasetError, match="too short for 2 documents of 4000 tokens"):
        build_workload(config, data, TOKENIZER)


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
    config = replace(
        BASE, workload="document_questions", dataset=str(path), turns=1, sharing=4,
        system_tokens=300,
    )  # fmt: skip
    built = build_workload(config, load_source(config), TOKENIZER)
    assert built.sessions[2].expected == (("answer 2",),)
    assert "What is 2?" in TOKENIZER.decode(built.sessions[2].first_prompt)


def test_a_trace_is_replayed_with_exactly_its_sharing(tmp_path: Path) -> None:
    config, data = source("mooncake", tmp_path, time_scale=2.0)
    built = build_workload(config, data, TOKENIZER)
    block = round(BLOCK_TOKENS * config.length_scale)
    assert [session.arrival_s for session in built.sessions] == [0.0, 0.5, 1.0, 1.8]
    prompts = [session.first_prompt for session in built.sessions]
    assert [len(prompt) for prompt in prompts] == [55, 35, 45, 26]
    assert [session.answer_tokens for session in built.sessions] == [(3,), (1,), (2,), (1,)]
    assert common(prompts[0], prompts[2]) == 45  # ids 7, 8: the whole of the shorter prompt
    assert common(prompts[0], prompts[3]) == block
    assert common(prompts[0], prompts[1]) < block
    assert built.facts["blocks_seen_before"] == 3


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
    found = load_source(replace(BASE, workload="mooncake", dataset=str(path)))
    assert len(found.trace) == 3
    assert found.dropped_chars == len(json.dumps(TRACE[-1])) - 20


def test_a_trace_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="pass --dataset PATH"):
        load_source(replace(BASE, workload="mooncake"))
    (tmp_path / "prose.txt").write_text("no trace")
    with pytest.raises(DatasetError, match="not a Mooncake trace"):
        load_source(replace(BASE, workload="mooncake", dataset=str(tmp_path / "prose.txt")))
    with pytest.raises(DatasetError, match="No such file"):
        load_source(replace(BASE, workload="mooncake", dataset=str(tmp_path / "none")))


def test_the_benchmark_client_is_planned_by_groups(tmp_path: Path) -> None:
    config, data = source("generated_shared_prefix", tmp_path)
    assert data is GENERATED
    plan = build_workload(config, data, TOKENIZER).bench
    assert plan is not None
    assert (plan.groups, plan.prompts_per_group) == (2, 2)
    with pytest.raises(ConfigError, match="conversations: must be a multiple of sharing 3"):
        build_workload(replace(config, sharing=3), data, TOKENIZER)


def test_a_puzzle_has_the_result_it_claims() -> None:
    import random

    for seed in range(20):
        text, result = make_puzzle(random.Random(seed))
        numbers = [int(word) for word in text.replace(".", "").split() if word.isdigit()]
        boxes, each, lost = numbers
        assert result == boxes * each - lost - boxes // 2


def test_answers_end_with_their_workload(tmp_path: Path) -> None:
    built: Workload = build_workload(*source("reasoning", tmp_path), TOKENIZER)
    assert all(session.turns == 1 for session in built.sessions)
    assert all(len(session.expected[0]) == 1 for session in built.sessions)


def test_a_data_set_by_name_is_read_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_rows(path: str, name: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((path, name, split))
        if path == "nobody/nothing":
            raise ConnectionError("no route to it\nand a long story")
        return [{"context": "Text. " * 90, "input": "Who?", "answers": ["Ada"]}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_rows))
    config = replace(BASE, workload="document_questions", dataset="hf:owner/bench/part:train")
    (document,) = load_source(config).documents
    assert document.questions[0].answers == ("Ada",)
    assert asked == [("owner/bench", "part", "train")]
    with pytest.raises(
        DatasetError, match=r"hf:nobody/nothing cannot be loaded \(no route to it\)"
    ):
        load_source(replace(config, dataset="hf:nobody/nothing"))
    assert asked[-1] == ("nobody/nothing", None, "test")
