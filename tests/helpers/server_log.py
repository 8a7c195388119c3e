"""What a server's log says: complaints of any checker, and the memory held at each step."""

from __future__ import annotations

import re

_BAD = ("Traceback", "Leak Detected", "leak detected", "use-after-free", "double free", "Error")
_BUSY_CHECK = re.compile(r"Mem Check \(BUSY\).* uncached=(\d+)")


def complaints(log: str) -> list[str]:
    """Lines of a log that a healthy run does not write."""
    return [line for line in log.splitlines() if any(word in line for word in _BAD)]


def peak_private_tokens(log: str) -> int:
    """The largest `uncached` figure of SGLang's check of every step, in tokens: pages held by
    running requests and not by the prefix cache. Needs the check at level 2, which logs it."""
    found = [int(match[1]) for match in _BUSY_CHECK.finditer(log)]
    assert found, "the server did not log its memory checks"
    return max(found)
