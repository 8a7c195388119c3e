"""A server looked at while requests run: its pool's gauges and this package's counters.

SGLang counts a token as used when a running request holds it, as evictable when only the prefix
cache does, and as available when nobody does; the gauges move when the server reports, at every
prefill and every `--decode-log-interval` decode steps. What cannot be read stays out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

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
TIMEOUT_S = 30.0
ADDED = (
    "pruned_requests", "evicted_tokens", "freed_pages", "taken_pages", "moved_tokens", "repacks",
    "dropped_plans", "early_evictions", "stalled_chunks", "admitted_by_pruning",
    "retractions_avoided",
)  # fmt: skip


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedSample:
    """One look at the pruned requests, `at_s` seconds after the run began.

    Fields:
        pruned_rows: running requests that lost a token.
        retained_pages, held_pages: private pages of those; destinations of copies under way.
        live_private_tokens: their live tokens in private pages.
        repacks: copies committed since the server started.
    """

    at_s: float
    pruned_rows: int = 0
    retained_pages: int = 0
    held_pages: int = 0
    live_private_tokens: int = 0
    repacks: int = 0


def parse_gauges(page: str) -> dict[str, float]:
    """Fields of `PoolSample` found on a Prometheus page; several label sets are added up."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        match = _LINE.match(line)
        # A labelled breakdown by priority repeats the total that is there without it.
        if match and match["name"] in GAUGES and 'priority="' not in (match["labels"] or ""):
            name = GAUGES[match["name"]]
            found[name] = found.get(name, 0.0) + float(match["value"])
    return found


def counters_of(server_info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """This package's counters in an answer of `/server_info`; None where there are none."""
    states = server_info.get("internal_states") or [{}]
    block = states[0].get("vtoken")
    return block if isinstance(block, Mapping) and "evicted_tokens" in block else None


def read_json(url: str, timeout: float = TIMEOUT_S) -> Any:
    """What a GET answers, None where it is no JSON or nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError):
        return None


def read_counters(base_url: str) -> Mapping[str, Any] | None:
    """The counters of a server now; None where there are none or it does not answer."""
    found = read_json(f"{base_url}/server_info")
    return counters_of(found) if isinstance(found, Mapping) else None


class Sampler:
    """Both looks at a fixed interval until it is cancelled.

    The gauges keep their last values from before the run until the server next reports, so
    samples count only from the first change on.
    """

    def __init__(self, http: aiohttp.ClientSession, begin: float, interval: float) -> None:
        self._http, self._begin, self._interval = http, begin, interval
        self._stale: dict[str, float] | None = None
        self.pool: list[PoolSample] = []
        self.pruned: list[PrunedSample] = []

    async def run(self) -> None:
        while True:
            # A missed look is a missing point; the requests' own errors are recorded.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
                async with self._http.get("/metrics/") as answer:
                    page = await answer.text() if answer.status == 200 else ""
                self.add_gauges(self._now(), parse_gauges(page))
                async with self._http.get("/server_info") as answer:
                    block = counters_of(await answer.json(content_type=None))
                if block is not None:
                    names = [item.name for item in fields(PrunedSample) if item.name != "at_s"]
                    found = {name: int(block.get(name, 0)) for name in names}
                    self.pruned.append(PrunedSample(at_s=self._now(), **found))
            await asyncio.sleep(self._interval)

    def _now(self) -> float:
        return time.perf_counter() - self._begin

    def add_gauges(self, at_s: float, gauges: dict[str, float]) -> None:
        """Keep a look at the gauges unless nothing has changed since the first one."""
        if not gauges:
            return
        if self._stale is None:
            self._stale = gauges
        if self.pool or gauges != self._stale:
            self.pool.append(PoolSample(at_s=at_s, **gauges))


def added(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any]:
    """What one run added to the counters; empty where the server has none."""
    if before is None or after is None:
        return {}
    found: dict[str, Any] = {n: int(after.get(n, 0)) - int(before.get(n, 0)) for n in ADDED}
    forks = [block.get("forks", {}).get("committed", 0) for block in (before, after)]
    return {**found, "forks": int(forks[1]) - int(forks[0])}


def private_memory(samples: Sequence[PrunedSample], page_size: int) -> dict[str, float]:
    """What pruned requests hold themselves, over all looks at any; empty if there was none.

    `private_pages` are those of a request, destinations of copies included; `waste_f` is the
    paper's F, 1 - mean over its pages of (live tokens / page size). `waste_f_after` and
    `limit_gap`, pages over the fewest that the live tokens fit into less 1, are of the looks right
    after a copy was committed (all looks where none was); they mean most when requests run one at
    a time.
    """
    seen = [sample for sample in samples if sample.pruned_rows and sample.retained_pages]
    if not seen or not page_size:
        return {}
    after = [
        new for old, new in zip(samples, samples[1:], strict=False)
        if new in seen and new.repacks > old.repacks
    ] or seen  # fmt: skip
    pages = sum(sample.retained_pages + sample.held_pages for sample in seen)
    fewest = sum(-(-sample.live_private_tokens // page_size) for sample in after)
    return {
        "private_pages": pages / sum(sample.pruned_rows for sample in seen),
        "waste_f": _waste(seen, page_size),
        "waste_f_after": _waste(after, page_size),
        "limit_gap": sum(sample.retained_pages for sample in after) / max(fewest, 1) - 1,
    }


def _waste(samples: Sequence[PrunedSample], page_size: int) -> float:
    live = sum(sample.live_private_tokens for sample in samples)
    return 1 - live / (sum(sample.retained_pages for sample in samples) * page_size)
