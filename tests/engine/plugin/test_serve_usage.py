"""`serve` before the engine: what it prints when SGLang refuses a flag, what a file of options and
a backend that nobody named come to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from vtoken_sglang.engine import serve
from vtoken_sglang.engine.plugin.launch import prefer_our_backend
from vtoken_sglang.engine.serve import _short_usage
from vtoken_sglang.options import ENVIRONMENT_VARIABLE


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


RESOLVED = """
import sys
from vtoken_sglang.options import from_environment
from vtoken_sglang.engine import serve
import sglang.launch_server

def show(server_args):
    print(from_environment().to_json())

sglang.launch_server.run_server = show
serve._check_model = serve._check_port = lambda *_: None
raise SystemExit(serve.serve(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("file", "flags", "policy", "keep"),
    [
        ({"vtoken-policy": "none"}, ["--vtoken-policy", "random", "--vtoken-keep", "0.3"],
         "random", 0.3),
        ({"vtoken-policy": "random", "vtoken-keep": 0.5}, ["--vtoken-keep", "0.3"],
         "random", 0.3),
        ({"vtoken-policy": "random", "vtoken-keep": 0.5}, [], "random", 0.5),
    ],
    ids=["both", "flag alone", "file alone"],
)  # fmt: skip
def test_the_command_line_wins_over_a_file(
    tmp_path: Path, file: dict[str, Any], flags: list[str], policy: str, keep: float
) -> None:
    """As for SGLang's own options; and either may hold what the other needs."""
    path = tmp_path / "options.yaml"
    path.write_text(json.dumps(file))  # which is YAML
    environment = {k: v for k, v in os.environ.items() if k != ENVIRONMENT_VARIABLE}
    arguments = ["--model-path", "m", "--device", "cpu", "--config", str(path), *flags]
    done = subprocess.run(
        [sys.executable, "-c", RESOLVED, *arguments],
        env=environment, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout.splitlines()[-1])
    assert (shown["policy"], shown["keep"]) == (policy, keep)


def test_a_file_may_name_the_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The early look at the port is for the one that will be used."""
    checked: list[Any] = []
    monkeypatch.setattr(serve, "_check_port", lambda *where: checked.append(where))
    monkeypatch.setattr(serve, "_default_threads", lambda: sys.exit(0))
    model = tmp_path / "config.json"
    model.write_text("{}")
    with pytest.raises(SystemExit):
        serve.serve(["--model-path", str(tmp_path), "--config", "c.yaml"])
    assert not checked
    with pytest.raises(SystemExit):
        serve.serve(["--model-path", str(tmp_path), "--port", "31000"])
    assert checked == [("127.0.0.1", 31000)]


@pytest.mark.parametrize(
    ("named", "device", "gpu", "expected"),
    [
        ({}, None, True, "flashinfer"),
        ({}, "cuda", True, "flashinfer"),
        ({}, None, False, None),
        ({}, "cpu", True, None),
        ({"attention_backend": "triton"}, None, True, "triton"),
        ({"prefill_attention_backend": "triton"}, None, True, None),
        ({"decode_attention_backend": "triton"}, None, True, None),
    ],
)
def test_flashinfer_is_named_where_nobody_named_a_backend(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, str], device: str, gpu: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    fields = {
        "attention_backend": None, "prefill_attention_backend": None,
        "decode_attention_backend": None, "device": device,
    }  # fmt: skip
    arguments = SimpleNamespace(**{**fields, **named})
    prefer_our_backend(arguments)
    assert arguments.attention_backend == expected
