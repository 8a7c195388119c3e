"""What `serve` prints when SGLang's own parser refuses a flag: one line, in this program's name."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("sglang")

from vtoken_sglang.engine.serve import _short_usage


def say_and_exit(text: str, status: int) -> None:
    """What an argparse parser does."""
    print(text, file=sys.stderr)
    raise SystemExit(status)


def test_a_refusal_is_cut_to_its_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    usage = "usage: sglang serve\n  [-h]\nsglang serve: error: no such flag"
    with pytest.raises(SystemExit), _short_usage(["--bogus"]):
        say_and_exit(usage, 2)
    shown = capsys.readouterr().err
    assert shown.startswith("vtoken-sglang serve: no such flag (")
    assert shown.count("\n") == 1


def test_other_output_is_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with _short_usage(["--page-size", "16"]):
        print("a notice", file=sys.stderr)
    with pytest.raises(SystemExit), _short_usage(["--help"]):
        say_and_exit("all the help", 0)
    assert capsys.readouterr().err == "a notice\nall the help\n"
