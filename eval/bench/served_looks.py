"""One served arm, asked one request at a time and looked at between its steps."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_sglang_eval.policy_server import PolicyServer

POOL = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """The runtime's counters and gauges at one moment.

    Fields:
        pruned_rows: requests that lost a token and still run.
        retained: private pages their ledgers hold. held: destination pages of pending copies.
        live: their live tokens in private pages.
        repacks, evicted: totals since the server started.
    """

    pruned_rows: int
    retained: int
    held: int
    live: int
    repacks: int
    evicted: int


@dataclass(frozen=True, slots=True)
class Request:
    """A greedy request: prompt ids, exact answer length, and options for this package."""

    prompt: list[int]
    answer_tokens: int
    options: Mapping[str, Any]


class PrunedServer(PolicyServer):
    """A server, parts of it off, as a context manager. It prunes what requests ask for."""

    def __init__(self, ablation: str, page_size: int, model: str, log: Path) -> None:
        flags = ("--vtoken-publish", "never", "--vtoken-ablation", ablation)
        super().__init__(model, POOL, log, *flags, page_size=page_size)

    def look(self) -> EvictionPlan:
        """Ask the scheduler; it answers between two steps."""
        state = json.loads(self.ask("/server_info"))["internal_states"][0]["vtoken"]
        return EvictionPlan(
            pruned_rows=state["pruned_rows"],
            retained=state["retained_pages"],
            held=state["held_pages"],
            live=state["live_private_tokens"],
            repacks=state["repacks"],
            evicted=state["evicted_tokens"],
        )

    def follow(self, request: Request) -> tuple[list[int], list[EvictionPlan]]:
        """Send one request and wait; returns its answer and looks before, during and after it."""
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
            answer = self.generate(request.prompt, request.answer_tokens, request.options)
        finally:
            over.set()
            watcher.join()
        if failures:
            raise failures[0]
        looks.append(self.look())
        return [int(token) for token in answer["output_ids"]], looks
