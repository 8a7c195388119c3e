"""The server's pool gauges over time, read from its Prometheus page.

SGLang counts a token as used when a running request holds it, as evictable when only the prefix
cache does, and as available when nobody does. The gauges move when the server reports, that is
at every prefill and every `--decode-log-interval` decode steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass

import aiohttp

# gauge on the page -> field of PoolSample
GAUGES = {
    "sglang:kv_used_tokens": "used",
    "sglang:kv_evictable_tokens": "evictable",
    "sglang:kv_available_tokens": "available",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "queued",
    "sglang:num_retracted_requests_total": "retracted",
}
_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSample:
    """One look at the gauges, `at_s` seconds after the run began. Tokens and request counts."""

    at_s: float
    used: float = 0.0
    evictable: float = 0.0
    available: float = 0.0
    running: float = 0.0
    queued: float = 0.0
    retracted: float = 0.0


def parse_gauges(page: str) -> dict[str, float]:
    """Fields of `PoolSample` found on a Prometheus page; several label sets are added up."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        match = _LINE.match(line)
        # A labelled breakdown by priority repeats the total that is there without it.
        if match and match["name"] in GAUGES and 'priority="' not in (match["labels"] or ""):
            field = GAUGES[match["name"]]
            found[field] = found.get(field, 0.0) + float(match["value"])
    return found


class PoolSampler:
    """Reads the gauges at a fixed interval until it is cancelled.

    The gauges keep their last values from before the run until the server next reports, so
    samples count only from the first change on.
    """

    def __init__(self, http: aiohttp.ClientSession, begin: float, interval: float) -> None:
        self._http, self._begin, self._interval = http, begin, interval
        self._stale: dict[str, float] | None = None
        self.samples: list[PoolSample] = []

    async def run(self) -> None:
        while True:
            # A missed look is a missing point in a plot; the requests' own errors are recorded.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with self._http.get("/metrics/") as answer:
                    page = await answer.text()
                self.add(time.perf_counter() - self._begin, parse_gauges(page))
            await asyncio.sleep(self._interval)

    def add(self, at_s: float, gauges: dict[str, float]) -> None:
        """Keep a look at the gauges unless nothing has changed since the first one."""
        if self._stale is None:
            self._stale = gauges
        if self.samples or gauges != self._stale:
            self.samples.append(PoolSample(at_s=at_s, **gauges))
