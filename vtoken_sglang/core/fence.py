"""Fences: how the scheduler learns that a copy is over, without waiting for it.

Until a fence has passed, the copy's destinations belong to the copy: a page given to someone else
before could be overwritten by a late write. A fence passes when the copy can write no more,
whether it succeeded or failed.
"""

import threading
import time
from typing import Protocol

from vtoken_sglang.core.faults import CopyFailedError


class Fence(Protocol):
    """End of one submitted copy."""

    def passed(self) -> bool:
        """Whether the copy can no longer write, without blocking. Raises CopyFailedError, every
        time it is asked, if the copy is over but its destinations do not hold the bytes."""

    def wait(self, timeout: float) -> bool:
        """Block up to `timeout` seconds; then as `passed`."""


class DoneFence:
    """Fence of a copy that was finished when `submit` returned."""

    def passed(self) -> bool:
        return True

    def wait(self, timeout: float) -> bool:
        return True


class ThreadFence:
    """Fence set by the worker thread that runs the copy."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._failure: BaseException | None = None

    def finish(self, failure: BaseException | None) -> None:
        """The worker is done with this copy; `failure` is what stopped it, if anything did."""
        self._failure = failure
        self._over.set()

    def passed(self) -> bool:
        return self._result(self._over.is_set())

    def wait(self, timeout: float) -> bool:
        return self._result(self._over.wait(timeout))

    def _result(self, over: bool) -> bool:
        if over and self._failure is not None:
            raise CopyFailedError(f"copy worker failed: {self._failure!r}") from self._failure
        return over


class DeviceEvent(Protocol):
    """The part of a CUDA event that is used."""

    def query(self) -> bool: ...


class EventFence:
    """Fence of a copy on a device stream: its event, and what must outlive the copy."""

    _POLL_SECONDS = 50e-6

    def __init__(self, event: DeviceEvent, keep_alive: object) -> None:
        self._event = event
        self._keep_alive: object | None = keep_alive

    def passed(self) -> bool:
        if not self._event.query():
            return False
        self._keep_alive = None
        return True

    def wait(self, timeout: float) -> bool:
        # Polls, since an event's own wait has no time limit.
        deadline = time.monotonic() + timeout
        while not self.passed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(self._POLL_SECONDS)
        return True
