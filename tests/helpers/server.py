"""Real SGLang servers for tests: started, asked, ended, and proved to be gone."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import httpx

from tests.helpers.processes import ProcessGroup, free_port

STOCK = ("-m", "sglang.launch_server")
PRODUCT = ("-m", "vtoken_sglang.cli", "serve")

# Exact comparisons need float32 (with dtype auto a float32 checkpoint is served in float16); an
# idle server would otherwise keep a whole core busy.
COMMON_FLAGS = ("--device", "cpu", "--dtype", "float32", "--sleep-on-idle")

_PROBE_TIMEOUT = 3.0  # /health generates a token and takes over a second
_REQUEST_TIMEOUT = 180.0


class ServerStartError(AssertionError):
    """The server ended, or stayed silent, before it was ready. Carries the end of its log."""


@dataclass(frozen=True, slots=True)
class ExitedCommand:
    """A command that ended on its own: exit status, its whole output, and its survivors."""

    status: int
    output: str
    leftovers: list[str]


def server_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment, set for a quiet offline server, plus `extra`."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    quiet["CUDA_VISIBLE_DEVICES"] = ""  # the CPU platform stays out where a GPU is seen
    return {**os.environ, **quiet, **(extra or {})}


class _ServerLock:
    """One server at a time on this machine, whoever tests: two cores hold no more.

    `VTOKEN_TEST_SERVER_LOCK` names another lock file to share.
    """

    def __init__(self) -> None:
        default = Path(tempfile.gettempdir()) / "vtoken_sglang-tests.lock"
        self.path = Path(os.environ.get("VTOKEN_TEST_SERVER_LOCK") or default)
        self.stream: TextIO | None = None

    def acquire(self) -> None:
        self.stream = self.path.open("a")
        fcntl.flock(self.stream, fcntl.LOCK_EX)

    def release(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None


def run_to_exit(
    command: Sequence[str],
    log: Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 180.0,
) -> ExitedCommand:
    """Run `python <command>` that is expected to end by itself. Raises if it does not.

    Takes the server lock, since a command that should refuse may start a server instead.
    """
    lock = _ServerLock()
    lock.acquire()
    try:
        group = ProcessGroup([sys.executable, *command], server_environment(environment), log)
        deadline = time.monotonic() + timeout
        watched = group.members()
        while group.popen.poll() is None:
            if time.monotonic() > deadline:
                group.end(grace=0)
                raise AssertionError(f"still running after {timeout:.0f} s\n{_tail(group)}")
            watched = list({*watched, *group.members()})
            time.sleep(0.2)
        leftovers = group.end(grace=0, watched=watched)
        return ExitedCommand(group.popen.returncode, group.output(), leftovers)
    finally:
        lock.release()


class ServerProcess:
    """A server as a context manager: `with ServerProcess(flags, log=path) as server: ...`

    Starts `python <entry> COMMON_FLAGS --host --port <flags>` under the machine-wide server lock,
    waits until /health answers 200, and on leaving ends it and checks that nothing is left.
    `graceful=False` kills without asking first.
    """

    def __init__(
        self,
        flags: Sequence[str],
        *,
        log: Path,
        entry: Sequence[str] = STOCK,
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 240.0,
        graceful: bool = True,
    ) -> None:
        self.port = free_port()
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        self.command = [sys.executable, *entry, *COMMON_FLAGS, *address, *flags]
        self.start_timeout, self.graceful = start_timeout, graceful
        self.lock_seconds = self.start_seconds = 0.0  # waiting for the lock; from start to ready
        self._environment = server_environment(environment)
        self._log_path = log
        self._lock = _ServerLock()
        self._group: ProcessGroup | None = None
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=_REQUEST_TIMEOUT, trust_env=False
        )

    def __enter__(self) -> Self:
        begun = time.monotonic()
        self._lock.acquire()
        self.lock_seconds, begun = time.monotonic() - begun, time.monotonic()
        try:
            self._group = ProcessGroup(self.command, self._environment, self._log_path)
            self._wait_until_ready(self._group)
            self.start_seconds = time.monotonic() - begun
            print(f"server ready in {self.start_seconds:.1f} s, lock {self.lock_seconds:.1f} s")
        except BaseException:
            self._stop(grace=0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leftovers = self._stop(grace=20.0 if self.graceful else 0)
        assert not leftovers, f"processes outlived the server: {leftovers}"

    def _stop(self, grace: float) -> list[str]:
        try:
            self._client.close()
            return self._group.end(grace) if self._group is not None else []
        finally:
            self._lock.release()

    def _wait_until_ready(self, group: ProcessGroup) -> None:
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline:
            status = group.popen.poll()
            if status is not None:
                raise ServerStartError(f"ended with status {status}\n{_tail(group)}")
            try:
                if self._client.get("/health", timeout=_PROBE_TIMEOUT).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            time.sleep(0.3)
        raise ServerStartError(f"not ready after {self.start_timeout:.0f} s\n{_tail(group)}")

    @property
    def pid(self) -> int:
        assert self._group is not None, "the server was not started"
        return self._group.pid

    @property
    def log(self) -> str:
        """Everything the server wrote so far."""
        return self._log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def exit_status(self) -> int | None:
        """Exit status of the launcher; None while it runs, negative when a signal ended it."""
        return self._group.popen.poll() if self._group is not None else None

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self._client.get(path, **options)

    def post(self, path: str, body: Any) -> httpx.Response:
        """Send `body` as JSON; a text is JSON already."""
        if isinstance(body, str):
            headers = {"Content-Type": "application/json"}
            return self._client.post(path, content=body, headers=headers)
        return self._client.post(path, json=body)

    def generate(self, payload: Mapping[str, Any]) -> Any:
        """Return the JSON answer of /generate: an object, or a list of n objects. Raises on error.

        `payload` holds `text` or `input_ids`, `sampling_params`, and any other request field.
        """
        return _checked(self.post("/generate", dict(payload)))

    def generate_concurrently(self, payloads: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Send all requests at once; return their answers in the given order."""
        with ThreadPoolExecutor(max_workers=max(1, len(payloads))) as pool:
            return list(pool.map(self.generate, payloads))

    def stream(self, payload: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the JSON object of each server-sent event of a streamed /generate."""
        body = {**payload, "stream": True}
        with self._client.stream("POST", "/generate", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise AssertionError(f"HTTP {response.status_code}: {response.text}")
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

    def chat(self, messages: Sequence[Mapping[str, str]], **fields: Any) -> Any:
        """Return the JSON answer of /v1/chat/completions. Raises on an HTTP error."""
        body = {"model": "default", "messages": list(messages), **fields}
        return _checked(self.post("/v1/chat/completions", body))


def _checked(response: httpx.Response) -> Any:
    assert response.status_code == 200, f"HTTP {response.status_code}: {response.text}"
    return response.json()


def _tail(group: ProcessGroup, lines: int = 40) -> str:
    return "\n".join(group.output().splitlines()[-lines:])
