"""Start one server, wait until it answers, and leave nothing behind.

The server gets a session of its own, so that its whole process group can be ended: on success,
on failure and on Ctrl-C alike. Its output goes to a log file beside the results.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from .errors import ConfigError, ServerError

HOST = "127.0.0.1"
PROBE_TIMEOUT_S = 3.0  # /health generates a token and can take over a second
PROBE_INTERVAL_S = 0.5
STOP_GRACE_S = 10.0
SETTLE_S = 10.0  # a crashing SGLang writes diagnostics for some seconds before it ends
TAIL_LINES = 15


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def require_free(port: int) -> None:
    """Raise ConfigError unless `port` can be bound on the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            reason = "in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
            raise ConfigError("port", f"must be free ({reason})", port) from error


def log_tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""


def http_ok(url: str, timeout: float = PROBE_TIMEOUT_S) -> bool:
    """Whether a GET answers 200 in time."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


class ServerProcess:
    """A server as a context manager: entered when it answers, gone when left.

    Fields:
        base_url: where it answers.
        startup_s: seconds from start to the first healthy answer.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
        startup_timeout: float = 300.0,
    ) -> None:
        self.command = list(command)
        self.base_url = f"http://{HOST}:{port}"
        self.log_path = log_path
        self.startup_s = 0.0
        self._port = port
        self._environment = {**os.environ, **(environment or {})}
        self._startup_timeout = startup_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Start and wait.

        Raises:
            ConfigError: the port is taken.
            ServerError: the server ended early or did not answer in time.
        """
        require_free(self._port)
        self._log = self.log_path.open("xb")
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        begin = time.monotonic()
        while not http_ok(f"{self.base_url}/health"):
            self.require_alive("before it answered")
            if time.monotonic() - begin > self._startup_timeout:
                raise self.error(f"server did not answer within {self._startup_timeout:.0f} s")
            time.sleep(PROBE_INTERVAL_S)
        # Another program may have taken the port meanwhile and be the one that answered.
        self.require_alive("before it answered")
        self.startup_s = time.monotonic() - begin

    def require_alive(self, when: str, settle_s: float = 0.0) -> None:
        """Raise ServerError with the end of the log if the server has ended.

        Args:
            when: end of the message's sentence.
            settle_s: how long to wait for an end that may be under way: a client sees a closed
                connection before the process is gone.
        """
        if settle_s:
            _wait_for(lambda: self._process is None or self._process.poll() is not None, settle_s)
        code = self._process.poll() if self._process else None
        if self._process is None or code is not None:
            raise self.error(f"server ended with exit status {code} {when}")

    def error(self, problem: str) -> ServerError:
        """A ServerError that shows the end of this server's log."""
        return ServerError(problem, log_tail(self.log_path), self.log_path.name)

    def cpu_seconds(self) -> float:
        """CPU time used so far by the server's processes (those in its process group)."""
        return group_cpu_seconds(self._process.pid) if self._process else 0.0

    def stop(self) -> None:
        """End the whole process group: politely, then for certain. Safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            try:
                if self.startup_s:  # one that is still loading does not listen to a polite signal
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGINT)  # SGLang ends sooner than on SIGTERM
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_GRACE_S)
            finally:  # also when a second Ctrl-C falls into the wait
                # The leader's children may outlive it; the group id stays theirs.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _wait_for(lambda: not group_members(process.pid), STOP_GRACE_S)
        if self._log is not None:
            self._log.close()
            self._log = None


def _wait_for(condition: Callable[[], bool], timeout: float) -> bool:
    """Poll `condition` until it holds or the time is up; return whether it holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _stat_fields(process_id: str) -> list[str]:
    """Fields of /proc/PID/stat from the state on (index 0), empty if the process is gone."""
    with contextlib.suppress(OSError):
        return Path("/proc", process_id, "stat").read_text().rpartition(")")[2].split()
    return []


def group_members(group: int) -> list[int]:
    """Ids of the living processes of a process group (zombies left out; Linux only)."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        fields = _stat_fields(entry.name)
        if fields and fields[0] != "Z" and int(fields[2]) == group:
            members.append(int(entry.name))
    return members


def group_cpu_seconds(group: int) -> float:
    """User and system time of a process group's living processes, in seconds."""
    ticks = 0
    for member in group_members(group):
        fields = _stat_fields(str(member))
        if fields:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
