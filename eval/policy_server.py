"""A served engine whose requests choose their own policies, asked one request after the other."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .server import HOST, ServerProcess, free_port

REQUEST_TIMEOUT_S = 600.0
PAGE_SIZE = 16


class PolicyServer(ServerProcess):
    """A server as a context manager. It prunes nothing but what a request asks for."""

    def __init__(
        self,
        model: str,
        pool: int,
        log: Path,
        *flags: str,
        page_size: int = PAGE_SIZE,
        device: str = "cpu",
    ) -> None:
        port = free_port()
        command = [sys.executable, "-m", "vtoken_sglang.cli", "serve"]
        command += ["--model-path", model, "--host", HOST, "--port", str(port), "--device", device]
        if device == "cpu":
            command += ["--dtype", "float32", "--sleep-on-idle"]
        command += ["--page-size", str(page_size), "--max-total-tokens", str(pool)]
        command += ["--vtoken-policy", "streaming_llm", "--vtoken-keep", "1.0", *flags]
        super().__init__(command, port, log, {"OMP_NUM_THREADS": "1"} if device == "cpu" else {})

    def generate(
        self,
        prompt: Sequence[int],
        tokens: int,
        options: Mapping[str, Any],
        name: str = "",
        *,
        ignore_eos: bool = True,
    ) -> Any:
        """Greedy answer of `tokens` tokens (at most, without `ignore_eos`): SGLang's /generate."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": ignore_eos}
        body: dict[str, Any] = {
            "input_ids": list(prompt),
            "sampling_params": {**sampling, "custom_params": {"vtoken": dict(options)}},
        }
        if name:
            body["rid"] = name
        return json.loads(self.ask("/generate", body))

    def ask(self, path: str, body: Any = None) -> bytes:
        """A POST of `body` as JSON, a GET without one. Raises HTTPError when it is refused."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base_url + path, data, headers)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            found: bytes = answer.read()
            return found
