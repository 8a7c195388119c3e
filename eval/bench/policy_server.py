"""A served engine whose requests choose their own policies."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from vtoken_sglang_eval.server import HOST, ServerProcess, free_port

REQUEST_TIMEOUT_S = 600.0
PAGE_SIZE = 16


class PolicyServer:
    """A server as a context manager. By default it keeps every token of a request."""

    def __init__(self, model: str, pool: int, log: Path, *flags: str, device: str = "cpu") -> None:
        port = free_port()
        command = [sys.executable, "-m", "vtoken_sglang.cli", "serve"]
        command += ["--model-path", model, "--host", HOST, "--port", str(port), "--device", device]
        if device == "cpu":
            command += ["--dtype", "float32", "--sleep-on-idle"]
        command += ["--page-size", str(PAGE_SIZE), "--max-total-tokens", str(pool)]
        command += ["--vtoken-policy", "streaming_llm", "--vtoken-keep", "1.0", *flags]
        environment = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
        self._server = ServerProcess(command, port, log, environment)

    def __enter__(self) -> PolicyServer:
        self._server.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.__exit__(kind, error, trace)

    def generate(
        self, prompt: Sequence[int], tokens: int, options: Mapping[str, Any], name: str = ""
    ) -> Any:
        """Greedy answer of exactly `tokens` tokens: SGLang's /generate as JSON."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {**sampling, "custom_params": {"vtoken": dict(options)}},
        }
        if name:
            body["rid"] = name
        headers = {"Content-Type": "application/json"}
        url = self._server.base_url + "/generate"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.loads(answer.read())
