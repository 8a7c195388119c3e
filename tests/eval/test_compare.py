"""`eval compare` from end to end on stand-in servers: what is asked, kept, resumed and refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval import questions, runner, targets
from vtoken_sglang_eval.errors import ResultsError
from vtoken_sglang_eval.main import main
from vtoken_sglang_eval.server import ServerProcess, free_port
from vtoken_sglang_eval.store import read_runs

from tests.eval.builders import CharacterTokenizer
from tests.eval.test_workloads import conversations

SCRIPT = Path(__file__).with_name("fake_server.py")
ANSWER = {"role": "assistant", "content": "ok"}
TALKS = [{"messages": [{"role": "user", "content": f"question {at}"}, ANSWER]} for at in range(4)]


@pytest.fixture(autouse=True)
def _characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ModelTokenizer", lambda _model: CharacterTokenizer())


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, TALKS)))
    return str(path)


def fake(folder: Path, *flags: str) -> ServerProcess:
    port = free_port()
    command = [sys.executable, str(SCRIPT), "--port", str(port), "--model-path", "tiny", *flags]
    return ServerProcess(command, port, folder / f"fake-{port}.log", startup_timeout=60.0)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand-ins are started in place of engines; the ablations of those that were, in order."""
    seen: list[str] = []

    def command(_options: Any, ablation: str, port: int) -> list[str]:
        seen.append(ablation)
        return [sys.executable, str(SCRIPT), "--port", str(port)]

    monkeypatch.setattr(targets, "server_command", command)
    return seen


def compare(data: str, out: Path, *words: str) -> int:
    return main(
        ["compare", "--dataset", data, "--out", str(out), "--repeats", "2", "--concurrency", "2",
         "--sample-interval", "0.05", *words]
    )  # fmt: skip


def test_a_server_that_runs_is_asked_for_every_arm(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked"
    with fake(tmp_path, "--asked-file", str(asked)) as server:
        status = compare(data, tmp_path / "out", "--url", server.base_url, "--policies", "tova")
    assert status == 0
    head, runs = read_runs(tmp_path / "out")
    assert Counter(run["arm"] for run in runs) == {
        "native": 2, "tova 0.5 skip": 2, "tova 0.5 mask": 2, "tova 0.5 auto": 2
    }  # fmt: skip
    said = [json.loads(line) for line in asked.read_text().splitlines()]
    ways = Counter(one["shared"] for one in said if one and one["policy"] == "tova")
    assert ways == {way: 1 + 2 * 4 for way in ("skip", "mask", "auto")}  # one to see if it may
    # Each session draws for itself, alike in every arm.
    seeds = {one["seed"] for one in said if one and one.get("shared") == "auto"}
    assert seeds == {0, 1, 2, 3}
    assert head["missing"] == ["CPU time of the server: it was not started here"]
    assert "cpu_ms_per_token" not in runs[0]
    assert runs[0]["requests"] == 4
    printed = capsys.readouterr().out
    assert "native's tokens/s" in printed
    assert (tmp_path / "out" / "report.html").exists()
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 1 + len(runs)


def test_a_plain_server_beside_one_with_the_plugin(data: str, tmp_path: Path) -> None:
    with fake(tmp_path, "--plain") as plain, fake(tmp_path) as ours:
        urls = ["--url", plain.base_url, "--url", ours.base_url]
        assert compare(data, tmp_path / "out", *urls, "--policies", "tova", "--shared", "auto") == 0
    head, runs = read_runs(tmp_path / "out")
    assert {run["arm"] for run in runs} == {"native @1", "native @2", "tova 0.5 auto @2"}
    assert head["baseline"] == "native @1"
    assert any("no --enable-metrics" in text for text in head["missing"])
    assert "held_per_request" not in next(run for run in runs if run["arm"] == "native @1")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plain"], "runs without vtoken-sglang, so no request can be pruned"),
        (["--foreign"], "answers, but not as an SGLang server does"),
        (["--fail", "choosy"], "refuses tova 0.5 skip .vtoken.policy: this server prunes nothing"),
    ],
)
def test_a_server_that_cannot_be_compared_is_refused_in_one_line(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with fake(tmp_path, *flags) as server:
        words = ["--url", server.base_url, "--policies", "tova"]
        assert compare(data, tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error.replace("(", ".")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "nobody answers"),
        (["--url", "127.0.0.1:9"], "url: must start with http:// or https://"),
        (["--policies", "bogus"], "policies: must be among"),
        (["--lm-eval", "gsm8k"], "pip install 'lm_eval"),
        (["--dataset", "nowhere.json"], "--dataset nowhere.json: No such file"),
        (["--model", "./nowhere"], "model: must be an existing folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    words: list[str], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(questions, "NEEDED", "surely_not_installed")
    assert compare(data, tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_ablation_gets_a_server_of_its_own_and_a_repeat_rotates(
    data: str, tmp_path: Path, started: list[str]
) -> None:
    words = ["--model", str(tmp_path), "--ablations", "naive", "--shared", "auto"]
    assert compare(data, tmp_path / "out", *words) == 0
    assert started == ["", "naive", "naive", ""]
    _, runs = read_runs(tmp_path / "out")
    assert {run["arm"] for run in runs} == {"native", "snapkv 0.5 auto", "snapkv 0.5 mask naive"}
    assert all(run["cpu_ms_per_token"] >= 0 for run in runs)


def test_paired_servers_stay_up(data: str, tmp_path: Path, started: list[str]) -> None:
    path = tmp_path / "study.toml"
    path.write_text('policies = []\nablations = ["stock", "native", "hook-only"]\npaired = true\n')
    words = ["--dataset", data, "--model", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["study", str(path), *words, "--repeats", "2", "--concurrency", "2"]) == 0
    assert started == ["stock", "native", "hook-only"]
    head, runs = read_runs(tmp_path / "out")
    assert head["baseline"] == "native"
    assert [run["arm"] for run in runs[3:]] == ["native", "hook-only", "stock"]


def test_what_was_measured_before_an_interrupt_is_kept_and_gone_on_with(
    data: str, tmp_path: Path, started: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    measure, out = runner._measure, tmp_path / "out"

    def interrupted(plan: Any, arm: Any, *rest: Any) -> dict[str, Any]:
        if arm.name == "snapkv 0.5 mask":
            raise KeyboardInterrupt
        return measure(plan, arm, *rest)

    monkeypatch.setattr(runner, "_measure", interrupted)
    assert compare(data, out, "--model", str(tmp_path)) == 130
    assert [run["arm"] for run in read_runs(out)[1]] == ["native", "snapkv 0.5 skip"]
    assert (out / "report.html").exists()
    with (out / "runs.jsonl").open("a") as stream:
        stream.write('{"kind": "run", "arm": "snapk')  # the writer was killed

    monkeypatch.setattr(runner, "_measure", measure)
    before = (out / "runs.jsonl").read_text().splitlines()[:3]
    assert compare(data, out, "--model", str(tmp_path)) == 0
    _, runs = read_runs(out)
    assert len(runs) == 8
    assert (out / "runs.jsonl").read_text().splitlines()[:3] == before
    capsys.readouterr()
    assert compare(data, out, "--model", str(tmp_path), "--seed", "1") == 2
    assert "holds a study with other settings" in capsys.readouterr().err
    assert len(read_runs(out)[1]) == 8


def test_questions_are_asked_with_the_arm_s_own_options(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "load_dataset", lambda _path: long_talks())
    monkeypatch.setattr(questions, "find_dataset", lambda _path: None)
    asked = tmp_path / "asked"
    words = ["--policies", "tova", "--shared", "auto", "--quality", "--quality-tokens", "300"]
    with fake(tmp_path, "--asked-file", str(asked)) as server:
        # The conversations at hand have answers too short to hide anything in.
        monkeypatch.setattr(runner, "tasks_of", with_long_text)
        assert compare(data, tmp_path / "out", "--url", server.base_url, *words) == 0
    _, runs = read_runs(tmp_path / "out")
    assert {run["questions"] for run in runs} == {9.0}
    assert {run["quality"] for run in runs} == {0.0}  # the stand-in knows nothing
    assert Counter(one["kind"] for one in runs[0]["answers"]) == {"needle": 5, "recall": 4}
    said = [json.loads(line) for line in asked.read_text().splitlines()]
    assert sum(one is not None and one["policy"] == "tova" for one in said) == 1 + 2 * (4 + 9)


def long_talks() -> Any:
    from dataclasses import replace

    data = conversations()
    text = "This is a sentence of some plain words. " * 40
    talks = tuple(replace(one, assistant_turns=(text,)) for one in data.conversations)
    return replace(data, conversations=talks)


def with_long_text(options: Any, _dataset: Any, tokenizer: Any, repeat: int) -> Any:
    return questions.tasks_of(options, long_talks(), tokenizer, repeat)


def test_a_dry_run_starts_nothing(
    data: str, tmp_path: Path, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(tmp_path), "--ablations", "naive", "--dry-run"]
    assert compare(data, tmp_path / "out", *words) == 0
    printed = capsys.readouterr().out
    assert "snapkv 0.5 auto: {'policy': 'snapkv', 'keep': 0.5, 'shared': 'auto'" in printed
    assert printed.count("server: ") == 2
    assert not (tmp_path / "out").exists()


def test_a_missing_extra_is_told_before_anything_is_measured(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "altair", None)
    assert compare(data, tmp_path / "out", "--model", str(tmp_path), "--dry-run") == 0
    assert compare(data, tmp_path / "out", "--model", str(tmp_path)) == 2
    assert "pip install 'vtoken-sglang[eval]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_failing_server_shows_its_log(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(_options: Any, _ablation: str, port: int) -> list[str]:
        return [sys.executable, str(SCRIPT), "--port", str(port), "--fail", "exit"]

    monkeypatch.setattr(targets, "server_command", command)
    assert compare(data, tmp_path / "out", "--model", str(tmp_path)) == 2
    assert "the fake model is not to be found" in capsys.readouterr().err


def test_a_failed_request_is_counted_and_told(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "_warm_up", lambda *_: None)
    with fake(tmp_path, "--fail", "short") as server:
        words = ["--url", server.base_url, "--policies", "none", "--repeats", "1"]
        assert compare(data, tmp_path / "out", *words) == 1
    assert "4 requests failed" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", '{"format": "other/1"}\n'])
def test_a_file_that_is_no_study_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "runs.jsonl").write_text(text)
    with pytest.raises(ResultsError):
        read_runs(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
