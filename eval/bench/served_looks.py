"""One served arm, asked one request at a time and looked at between its steps."""

from __future__ import annotations

import json
import sys
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vtoken_sglang_eval.server import HOST, ServerProcess, free_port

POOL = 4096
REQUEST_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The runtime's counters and gauges at one moment.

    Fields:
        pruned_rows: requests that lost a token and still run.
        retained: private pages their ledgers hold. held: destination pages of pending copies.
        live: their live tokens in private pages.
        repacks, killed: totals since the server started.
    """

    pruned_rows: int
    retained: int
    held: int
    live: int
    repacks: int
    killed: int


@dataclass(frozen=True, slots=True)
class Request:
    """A greedy request: prompt ids, exact answer length, and options for this package."""

    prompt: list[int]
    answer_tokens: int
    options: Mapping[str, Any]


class PrunedServer:
    """A server of one arm as a context manager. The server prunes what requests ask for."""

    def __init__(self, arm: str, page_size: int, model: str, log: Path) -> None:
        port = free_port()
        command = [sys.executable, "-m", "vtoken_sglang.cli", "serve"]
        command += ["--model-path", model, "--host", HOST, "--port", str(port)]
        command += ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle"]
        command += ["--page-size", str(page_size), "--max-total-tokens", str(POOL)]
        command += ["--vtoken-policy", "streaming_llm", "--vtoken-keep", "1.0"]
        command += ["--vtoken-publish", "never", "--vtoken-arm", arm]
        self._server = ServerProcess(command, port, log, {"OMP_NUM_THREADS": "1"})

    def __enter__(self) -> PrunedServer:
        self._server.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.__exit__(kind, error, trace)

    def look(self) -> Look:
        """Ask the scheduler; it answers between two steps."""
        state = self._json("/server_info")["internal_states"][0]["vtoken"]
        return Look(
            pruned_rows=state["pruned_rows"],
            retained=state["retained_pages"],
            held=state["held_pages"],
            live=state["live_private_tokens"],
            repacks=state["repacks"],
            killed=state["killed_tokens"],
        )

    def ask(self, request: Request) -> tuple[list[int], list[Look]]:
        """Send one request and wait; returns its answer and looks before, during and after it."""
        body = {
            "input_ids": request.prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": request.answer_tokens,
                "ignore_eos": True,
                "custom_params": {"vtoken": dict(request.options)},
            },
        }
        looks, over = [self.look()], threading.Event()
        failures: list[BaseException] = []

        def keep_looking() -> None:
            try:
                while not over.is_set():
                    looks.append(self.look())
            except BaseException as failure:
                failures.append(failure)

        watcher = threading.Thread(target=keep_looking)
        watcher.start()
        try:
            answer = self._json("/generate", body)
        finally:
            over.set()
            watcher.join()
        if failures:
            raise failures[0]
        looks.append(self.look())
        return [int(token) for token in answer["output_ids"]], looks

    def _json(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._server.base_url + path, data, headers)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.loads(answer.read())
