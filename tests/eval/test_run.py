"""A whole evaluation against stand-in servers: results, figures, report, interruption."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from vtoken_sglang_eval import arms, cell, run, server
from vtoken_sglang_eval.figures import read_figures
from vtoken_sglang_eval.main import main
from vtoken_sglang_eval.results import read_result
from vtoken_sglang_eval.server import ServerProcess

from tests.eval.builders import CharacterTokenizer

SCRIPT = Path(__file__).with_name("fake_server.py")
SIZES = ["--conversations", "3", "--turns", "2", "--concurrency", "2", "--system-tokens", "80"]
SIZES += ["--user-tokens", "30", "--out-tokens", "4", "--pool", "4096", "--device", "cpu"]


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a tiny evaluation; every arm's launcher is the stand-in server."""
    talks = [
        {
            "id": str(number),
            "conversations": [
                {"from": name, "value": f"{name} {turn} of talk {number}, with words to spare"}
                for turn in range(2)
                for name in ("human", "gpt")
            ],
        }
        for number in range(9)
    ]
    (tmp_path / "talk.json").write_text(json.dumps(talks))
    (tmp_path / "tiny").mkdir()
    monkeypatch.setattr(server, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(run, "ModelTokenizer", lambda _model: CharacterTokenizer())
    monkeypatch.setattr(arms.Arm, "launcher", lambda _self: [sys.executable, str(SCRIPT)])
    flags = ["--model", str(tmp_path / "tiny"), "--dataset", str(tmp_path / "talk.json")]
    (tmp_path / "tiny.toml").write_text("sample_interval = 0.01\n")
    flags += ["--config", str(tmp_path / "tiny.toml"), "--out", str(tmp_path / "out")]
    return ["run", *flags, *SIZES]


def folders(words: list[str]) -> list[Path]:
    return sorted(Path(words[words.index("--out") + 1]).iterdir())


def test_a_whole_evaluation(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "serve.json"
    assert main([*words, "--repeats", "2", "--figures", str(figures)]) == 0
    (folder,) = folders(words)
    result = read_result(folder)
    order = [(entry["repeat"], entry["arm"]) for entry in result["runs"]]
    assert order == [
        (0, "stock"), (0, "native"), (0, "hook-only"),
        (1, "native"), (1, "hook-only"), (1, "stock"),
    ]  # fmt: skip
    assert {entry["summary"]["requests"] for entry in result["runs"]} == {6}
    assert all(not entry["different"] for entry in result["tokens"]["arms"])
    assert {path.name for path in folder.glob("server-*.log")} == {
        f"server-{repeat}-{arm}.log"
        for repeat in (1, 2)
        for arm in ("stock", "native", "hook-only")
    }
    assert (folder / "report.html").read_text().count("<svg") == 9
    document = read_figures(figures)
    assert document is not None
    assert document["repeats"] == 2
    assert str(tmp_path) not in figures.read_text()
    shown = capsys.readouterr()
    assert shown.out.index("Estimated time") < shown.out.index("median of 2 repeats")
    assert "[6/6] repeat 2 stock" in shown.err


def test_arms_that_answer_differently_are_found(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = arms.Arm(name="native", summary="Shifted.", vtoken_args=("--shift", "1"))
    monkeypatch.setitem(arms.ARMS, "native", changed)
    assert main([*words, "--repeats", "1", "--arms", "stock,native"]) == 0
    assert "native: 3 of 6 answers differ from stock's to the same prompt, 6 in all." in (
        capsys.readouterr().out
    )


def test_failed_requests_give_status_1_and_no_figures(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        run, "require_answers", lambda _server, _trace: None
    )  # let warm-up fail too
    monkeypatch.setattr(cell, "SETTLE_S", 0.1)
    figures = tmp_path / "serve.json"
    extra = ["--repeats", "1", "--server-args", "--fail short"]
    assert main([*words, *extra, "--arms", "stock"]) == 1
    assert "3 requests failed" in capsys.readouterr().err  # each session stops at its first
    extra += ["--arms", "native,hook-only", "--figures", str(figures)]
    assert main([*words, *extra]) == 2
    assert not figures.exists()


def test_a_server_that_ends_early_gives_status_2_and_its_log(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--server-args", "--fail exit"]) == 2
    error = capsys.readouterr().err
    assert "exit status 3" in error
    assert "the fake model is not to be found" in error
    assert not (folders(words)[0] / "result.json").exists()


def test_an_interruption_keeps_finished_runs_and_ends_the_server(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ServerProcess] = []
    original = ServerProcess.require_alive

    def interrupt_second(self: ServerProcess, when: str, settle_s: float = 0.0) -> None:
        original(self, when, settle_s)
        if when == "while it was measured":
            started.append(self)
            if len(started) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(ServerProcess, "require_alive", interrupt_second)
    assert main([*words, "--repeats", "1"]) == 130
    (folder,) = folders(words)
    assert not (folder / "result.json").exists()
    partial = json.loads((folder / "partial.json").read_text())
    assert [entry["arm"] for entry in partial["runs"]] == ["stock"]
    assert [entry.cpu_seconds() for entry in started] == [0.0, 0.0]


def test_a_dry_run_starts_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "arm hook-only: " in shown
    assert "Estimated time" in shown
    assert not Path(words[words.index("--out") + 1]).exists()


def test_reports_of_finished_runs(words: list[str], tmp_path: Path) -> None:
    assert main([*words, "--repeats", "1", "--arms", "stock"]) == 0
    (folder,) = folders(words)
    target = tmp_path / "both.html"
    assert main(["report", str(folder), str(folder / "result.json"), "--out", str(target)]) == 0
    assert target.read_text().count("<section>") == 2
    assert main(["report", str(folder)]) == 2  # its own report is there already


def test_a_trace_is_sent_at_its_times(words: list[str], tmp_path: Path) -> None:
    lines = [
        {"timestamp": at, "input_length": 600, "output_length": 500, "hash_ids": [0, at]}
        for at in (0, 100, 400)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = ["--workload", "mooncake", "--dataset", str(tmp_path / "trace.jsonl")]
    flags += ["--length-scale", "0.1", "--time-scale", "0.5", "--repeats", "1", "--arms", "stock"]
    assert main([*words, *flags]) == 0
    requests = read_result(folders(words)[0])["runs"][0]["requests"]
    # an answer takes over a quarter of a second: the second is sent while the first is served
    assert requests[1]["sent_s"] < requests[0]["latency_s"]
    for request, arrival in zip(requests, (0.0, 0.05, 0.2), strict=True):
        assert request["sent_s"] > arrival - 0.01  # a clock may tick early
        assert (request["prompt_tokens"], len(request["output_ids"])) == (60, 50)
