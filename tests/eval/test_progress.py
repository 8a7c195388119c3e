"""Progress: plain lines into a file, a bar on a terminal."""

from __future__ import annotations

import io

import pytest
from vtoken_sglang_eval.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def finish(stream: io.StringIO) -> str:
    progress = Progress(runs=2, requests_per_run=2, stream=stream)
    for number in range(2):
        progress.stage(f"run {number}")
        progress.request()
        progress.request()
        progress.run_finished(f"run {number} done")
    progress.close()
    progress.close()
    return stream.getvalue()


def test_a_file_gets_one_line_per_run() -> None:
    lines = finish(io.StringIO()).splitlines()
    assert [line.split(" (")[0] for line in lines] == ["[1/2] run 0 done", "[2/2] run 1 done"]
    assert "left" in lines[0]
    assert "left" not in lines[1]


@pytest.mark.parametrize("disabled", ["1", ""])
def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, disabled: str) -> None:
    monkeypatch.setenv("TQDM_DISABLE", disabled)
    text = finish(Terminal())
    assert "0/4" in text
    assert "run 0" in text
    assert "[2/2] run 1 done" in text
