"""A whole grid against stand-in servers: cells, resuming, table, report, figures."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from vtoken_sglang_eval import arms, cell, run, server
from vtoken_sglang_eval.figures import read_figures
from vtoken_sglang_eval.main import main
from vtoken_sglang_eval.server import ServerProcess

from tests.eval.builders import CharacterTokenizer

SCRIPT = Path(__file__).with_name("fake_server.py")
GRID = """
repeats = 2
pool = 4096
concurrency = 2
system_tokens = 80
user_tokens = 20
out_tokens = 4
sample_interval = 0.01
arms = ["native", "naive", "skip", "auto"]
[[grid]]
workload = "agent"
conversations = 2
turns = 2
sharing = [1, 2]
[[grid]]
workload = "reasoning"
conversations = 3
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a tiny grid; every arm's launcher is the stand-in server."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "small.toml").write_text(GRID)
    monkeypatch.setattr(server, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(run, "ModelTokenizer", lambda _model: CharacterTokenizer())
    monkeypatch.setattr(arms.Arm, "launcher", lambda _self: [sys.executable, str(SCRIPT)])
    words = ["full", "--config", str(tmp_path / "small.toml"), "--device", "cpu"]
    return [*words, "--model", str(tmp_path / "tiny"), "--out", str(tmp_path / "out")]


def cells(tmp_path: Path) -> Counter[str]:
    """Finished cells per study."""
    return Counter(path.parent.name for path in (tmp_path / "out" / "cells").glob("*/*.json"))


STUDIES = ("agent_sharing-1", "agent_sharing-2", "reasoning")


def test_a_whole_grid(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "eval.json"
    assert main([*words, "--figures", str(figures)]) == 0
    assert cells(tmp_path) == dict.fromkeys(STUDIES, 8)
    # native, naive, and one server for skip and auto, each once per repeat
    assert len(list((tmp_path / "out").glob("server-*.log"))) == 6
    document = read_figures(figures)
    assert document is not None
    assert len(document["rows"]) == 12
    row = next(row for row in document["rows"] if row["arm"] == "auto")
    assert row["figures"]["evicted_tokens"]["median"] == 4  # its requests
    assert "copied_bytes" not in row["figures"]  # the model's folder tells no size
    assert row["figures"]["agreement"]["median"] == 1.0  # the stand-in evicts nothing
    native = next(row for row in document["rows"] if row["arm"] == "native")
    assert native["figures"]["agreement"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert "auto_vs_skip_throughput_reasoning" in document["figures"]
    shown = capsys.readouterr()
    assert shown.out.index("24 cells, 24 of them to be measured now") < shown.out.index("tokens/s")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "All studies" in page
    assert page.count("<section>") == 4
    saved = json.loads((tmp_path / "out" / "cells" / "reasoning" / "skip-1.json").read_text())
    assert saved["looks"]
    assert str(tmp_path) not in figures.read_text()


def test_an_interrupted_grid_goes_on_where_it_stopped(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original = ServerProcess.require_alive
    measured: list[str] = []

    def interrupt_fifth(self: ServerProcess, when: str, settle_s: float = 0.0) -> None:
        original(self, when, settle_s)
        if when == "while it was measured":
            measured.append(when)
            if len(measured) == 5:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ServerProcess, "require_alive", interrupt_fifth)
        assert main(words) == 130
    assert sum(cells(tmp_path).values()) == 4
    before = {path: path.read_bytes() for path in (tmp_path / "out").glob("cells/*/*.json")}
    figures = tmp_path / "eval.json"
    early = ["--out", str(tmp_path / "early.html"), "--figures", str(figures)]
    assert main(["report", str(tmp_path / "out"), *early]) == 0
    document = read_figures(figures)
    assert document is not None
    assert document["command"].startswith("vtoken-sglang eval full")
    assert all(row["repeats"] == 1 for row in document["rows"])
    assert main([*words, "--figures", str(figures)]) == 0
    assert {row["repeats"] for row in json.loads(figures.read_text())["rows"]} == {2}
    assert main(words) == 0  # nothing left to measure: another report
    reports = sorted(path.name for path in (tmp_path / "out").glob("report*.html"))
    assert reports == ["report-2.html", "report.html"]
    assert "24 cells, 20 of them to be measured now" in capsys.readouterr().out
    assert cells(tmp_path) == dict.fromkeys(STUDIES, 8)
    assert all(path.read_bytes() == content for path, content in before.items())


def test_only_some_workloads_and_another_grid(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--only", "reasoning", "--arms", "native"]) == 0
    assert cells(tmp_path) == {"reasoning": 2}
    assert main([*words, "--only", "chess"]) == 2
    for other in (words, [*words, "--dry-run"]):
        assert main(other) == 2
        assert "holds another grid" in capsys.readouterr().err


def test_the_model_of_a_grid_file_is_the_one_that_is_served(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    grid = tmp_path / "small.toml"
    grid.write_text(f'model = "{tmp_path / "other"}"\n' + GRID)
    at = words.index("--model")
    without = [*words[:at], *words[at + 2 :]]
    assert main([*without, "--dry-run"]) == 0
    assert "--model-path other " in capsys.readouterr().out
    assert main([*words, "--dry-run"]) == 0  # a flag wins
    assert "--model-path tiny " in capsys.readouterr().out


def test_a_dry_run_shows_every_server_and_starts_none(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "server of skip, auto (6 cells)" in shown
    assert "6 server starts" in shown
    assert not (tmp_path / "out").exists()


def test_a_failing_server_keeps_what_was_measured(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cell, "SETTLE_S", 0.1)
    assert main([*words, "--server-args", "--fail die"]) == 2
    assert "ran out of luck" in capsys.readouterr().err


def test_plots_as_png(words: list[str], tmp_path: Path) -> None:
    assert main([*words, "--only", "reasoning", "--repeats", "1"]) == 0
    target = ["--out", str(tmp_path / "x.html"), "--png", str(tmp_path / "png")]
    assert main(["report", str(tmp_path / "out"), *target]) == 0
    files = list((tmp_path / "png").glob("reasoning-*.png"))
    assert len(files) >= 6
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
