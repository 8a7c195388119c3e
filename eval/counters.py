"""This package's counters over time, read from `/server_info` while requests run.

The scheduler answers between two steps, so every look is of one moment. Private pages are those
that pruned requests hold themselves; what the radix tree holds for them is in the pool's gauges.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import aiohttp

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """One look, `at_s` seconds after the run began.

    Fields:
        pruned_rows: running requests that lost a token.
        retained_pages, held_pages: private pages of those; destinations of copies under way.
        live_private_tokens: their live tokens in private pages.
        evicted_tokens, freed_pages, moved_tokens, repacks: totals since the server started.
    """

    at_s: float
    pruned_rows: int = 0
    retained_pages: int = 0
    held_pages: int = 0
    live_private_tokens: int = 0
    evicted_tokens: int = 0
    freed_pages: int = 0
    moved_tokens: int = 0
    repacks: int = 0


NAMES = tuple(field.name for field in fields(EvictionPlan) if field.name != "at_s")


def block_of(server_info: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The counters in an answer of `/server_info`; None for a server that prunes nothing."""
    states = server_info.get("internal_states") or [{}]
    block = states[0].get("vtoken")
    return block if isinstance(block, Mapping) and "evicted_tokens" in block else None


def read_block(base_url: str) -> Mapping[str, Any] | None:
    """The counters of a server now; None where there are none or it does not answer."""
    try:
        with urllib.request.urlopen(f"{base_url}/server_info", timeout=TIMEOUT_S) as answer:
            return block_of(json.loads(answer.read()))
    except (OSError, ValueError):
        return None


class LookSampler:
    """EvictionPass at a fixed interval until it is cancelled."""

    def __init__(self, http: aiohttp.ClientSession, begin: float, interval: float) -> None:
        self._http, self._begin, self._interval = http, begin, interval
        self.looks: list[EvictionPlan] = []

    async def run(self) -> None:
        while True:
            # A missed look is a missing point; the requests' own errors are recorded.
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
                async with self._http.get("/server_info") as answer:
                    block = block_of(await answer.json(content_type=None))
                if block is not None:
                    at_s = time.perf_counter() - self._begin
                    found = {name: int(block.get(name, 0)) for name in NAMES}
                    self.looks.append(EvictionPlan(at_s=at_s, **found))
            await asyncio.sleep(self._interval)


def totals(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, Any]:
    """What one run added to the counters; empty where the server has none.

    Forks come with the pages that the rule predicted and that were really saved, summed over the
    run's committed forks as far as the server's log still holds them (`forks_logged`).
    """
    if before is None or after is None:
        return {}
    found: dict[str, Any] = {
        name: int(after.get(name, 0)) - int(before.get(name, 0))
        for name in (
            "pruned_requests", "evicted_tokens", "freed_pages", "taken_pages", "moved_tokens",
            "repacks", "dropped_plans", "early_evictions", "stalled_chunks",
        )
    }  # fmt: skip
    forks = int(after["forks"]["committed"]) - int(before["forks"]["committed"])
    committed = [fork for fork in after["forks"]["log"] if fork["realised_pages"] is not None]
    logged = committed[-forks:] if forks else []
    found["forks"] = forks
    found["forks_logged"] = len(logged)
    found["fork_predicted_pages"] = sum(float(fork["predicted_pages"]) for fork in logged)
    found["fork_realised_pages"] = sum(int(fork["realised_pages"]) for fork in logged)
    return found


def private_memory(looks: Sequence[EvictionPlan], page_size: int) -> dict[str, float]:
    """Private pages per pruned request, their utilisation, the paper's F; empty if none was seen.

    F is 1 - mean over retained pages of (live tokens / page size), over all looks.
    """
    seen = [look for look in looks if look.pruned_rows and look.retained_pages]
    if not seen:
        return {}
    pages = sum(look.retained_pages for look in seen)
    held = sum(look.held_pages for look in seen)
    live = sum(look.live_private_tokens for look in seen)
    utilisation = live / (pages * page_size)
    return {
        "private_pages_per_request": (pages + held) / sum(look.pruned_rows for look in seen),
        "utilisation": utilisation,
        "waste_f": 1 - utilisation,
    }
