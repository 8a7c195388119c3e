"""The command line: what it says where something is missing or unknown."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vtoken_sglang import cli
from vtoken_sglang.cli import EVAL_EXTRA, main

WITHOUT = """
import sys
from vtoken_sglang.cli import main

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
raise SystemExit(main(sys.argv[1:]))
"""


def run_without(modules: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command where `modules` are not installed."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT % (modules,), *words],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("words", [("eval", "compare"), ("eval", "study", "workloads")])
def test_the_evaluation_without_its_extra_names_it_in_one_line(words: tuple[str, ...]) -> None:
    done = run_without(EVAL_EXTRA, *words)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "needs the extra eval: pip install 'vtoken-sglang[eval]'" in line
    assert any(f"{module} is missing" in line for module in EVAL_EXTRA)


def test_another_missing_module_is_not_blamed_on_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli, "import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="torch"):
        main(["eval", "report", "none.json"])


def test_an_unknown_command_is_shown_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv\n" * 10_000]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("vtoken-sglang: unknown command 'serv")
    assert len(line) < 300
