"""Result folders and files are made new, and nothing in them is overwritten."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.errors import ResultsError
from vtoken_sglang_eval.results import new_run_folder, read_result, rounded, write_new, write_result

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_every_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    names = [new_run_folder(tmp_path / "out", "quick", NOW).name for _ in range(3)]
    assert names == [f"00{number}-quick-20260102-030405" for number in (1, 2, 3)]


def test_numbers_go_on_after_a_gap_and_past_other_files(tmp_path: Path) -> None:
    (tmp_path / "007-run-x").mkdir()
    (tmp_path / "099-notes.txt").write_text("")
    assert new_run_folder(tmp_path, "run", NOW).name == "008-run-20260102-030405"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="--out"):
        new_run_folder(tmp_path / "file", "run", NOW)


def test_a_result_is_not_overwritten(tmp_path: Path) -> None:
    write_result(tmp_path, {"command": "first"})
    with pytest.raises(ResultsError, match="not overwritten"):
        write_result(tmp_path, {"command": "second"})
    assert read_result(tmp_path)["command"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ResultsError):
        write_new(tmp_path / "missing" / "file", "text")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=r"result\.json"):
        read_result(path)


def test_floats_are_shortened_and_nothing_else() -> None:
    data = {"a": (0.123456789, 1), "b": [True, None, "x"], "c": 123456789}
    assert rounded(data) == {"a": [0.1234568, 1], "b": [True, None, "x"], "c": 123456789}
    assert json.loads(json.dumps(rounded(data))) == rounded(data)


def test_commands_to_show_name_no_folder_of_this_machine() -> None:
    words = ["--model", "/somewhere/on/disk/tiny", "--dtype", "float32"]
    assert provenance.portable_command(words) == "--model tiny --dtype float32"


def test_provenance_of_this_checkout() -> None:
    found = provenance.versions()
    assert set(found) == {"python", "sglang", "torch", "transformers", "vtoken"}
    assert found["python"].count(".") == 2
    machine = provenance.machine("cpu")
    assert machine["cores"] >= 1
    assert provenance.device_label(machine).startswith("CPU: ")


def test_model_facts_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}")
    facts = provenance.model_facts(str(tmp_path))
    assert facts == {"name": tmp_path.name, "weight_bytes": 5}
    assert provenance.model_facts("org/name") == {"name": "name"}


def test_model_facts_of_a_name_are_those_of_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    sizes = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    asked: list[str] = []

    def look(model: str, name: str) -> str:
        asked.append(model)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look)
    facts = provenance.model_facts("org/name", "bfloat16")
    assert facts == {"name": "name", "kv_bytes_per_token": 2 * 2 * 64 * 2}
    assert asked == ["org/name"]
