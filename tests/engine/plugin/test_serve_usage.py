"""`serve` before the engine: what it refuses, and what a file of options and a backend that nobody
named come to."""

from __future__ import annotations

import json
import os
import socket
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
from vtoken_sglang.errors import ConfigError
from vtoken_sglang.options import ENVIRONMENT_VARIABLE

RESOLVED = """
import sys
from vtoken_sglang.options import from_environment
from vtoken_sglang.engine import serve
import sglang.launch_server

def show(server_args):
    print(from_environment().to_json())

sglang.launch_server.run_server = show
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


def test_a_folder_that_is_not_there_is_no_model(tmp_path: Path) -> None:
    serve._require_model(str(tmp_path))
    serve._require_model("somebody/model")  # the hub's to say
    missing = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"--model-path: must exist, got '{missing}'"):
        serve._require_model(missing)


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", "INET"), ("::1", "INET6")])
def test_a_port_in_use_is_refused(host: str, family: str) -> None:
    with socket.socket(getattr(socket, f"AF_{family}")) as holder:
        try:
            holder.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {family}")
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port: must be free on {host} .*, got {port}"):
            serve._require_port(host, port)
    serve._require_port(host, port)


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
