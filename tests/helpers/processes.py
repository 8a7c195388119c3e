"""Start, watch and end process groups, and prove that nothing of them is left."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1


def free_port() -> int:
    """Return a TCP port on the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    # A evicted test run must not leave a server behind; SGLang's children follow their parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class ProcessGroup:
    """A command in a session of its own, its output in a file.

    Everything it starts is found again: by session (no SGLang process leaves it) and by descent.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def output(self) -> str:
        """Return everything written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def members(self) -> list[psutil.Process]:
        """Return every living process of the session or descended from the command."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if os.getsid(process.pid) == self.pid:
                    found[process.pid] = process
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.pid).children(recursive=True):
                found.setdefault(process.pid, process)
        return [process for process in found.values() if alive(process)]

    def end(self, grace: float, watched: Sequence[psutil.Process] = ()) -> list[str]:
        """Ask the command to stop, wait up to `grace` seconds, then eviction what is left.

        `watched` are members seen earlier, in case one has left the session since. Returns one
        line for each process that outlived the command on its own; empty is healthy.
        """
        watched = [*watched, *self.members()]
        if self.popen.poll() is None and grace > 0:
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(grace)
        ended_by_itself = self.popen.poll() is not None
        leftovers = self._leftovers(watched, wait=5.0) if ended_by_itself else []
        for process in {*watched, *self.members()}:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.popen.kill()
        self.popen.wait(10)
        stuck = self._leftovers(watched, wait=10.0)
        assert not stuck, f"processes survived SIGKILL: {stuck}"
        return leftovers

    def _leftovers(self, watched: Sequence[psutil.Process], wait: float) -> list[str]:
        deadline = time.monotonic() + wait
        while True:
            left = {*(process for process in watched if alive(process)), *self.members()}
            if not left or time.monotonic() > deadline:
                return [_describe(process) for process in left]
            time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    """Whether a process still runs; one that only waits to be reaped does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)
