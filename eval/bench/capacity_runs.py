"""Bursts and closed loops against one served arm: how many requests a pool holds at once.

A burst sends more requests than any arm can hold, all at once, and watches how many run together.
A level keeps `level` requests going, each client sending its next when the last is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np
from vtoken_sglang_eval.client import stream_generate
from vtoken_sglang_eval.pool import PoolSample, PoolSampler

PAGE_SIZE = 16
SAMPLE_S = 0.1
STATE_S = 0.3
VOCABULARY = range(200, 40_000)
TIMEOUT_S = 580


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Requests of one workload, all alike in length, none sharing a prefix.

    Fields:
        prompt, answer: tokens. burst: requests sent at once; more than the pool holds of them in
            any arm at either pool size.
    """

    name: str
    prompt: int
    answer: int
    burst: int

    def prompts(self, count: int, seed: str) -> list[list[int]]:
        draw = random.Random(f"{self.name} {seed}")
        return [draw.choices(VOCABULARY, k=self.prompt) for _ in range(count)]

    def held_natively(self, pool: int) -> int:
        """How many fit into `pool` tokens when each holds its full length."""
        return max(1, pool // (-(-(self.prompt + self.answer) // PAGE_SIZE) * PAGE_SIZE))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="prompt_heavy", prompt=1024, answer=32, burst=28),
        Shape(name="output_heavy", prompt=64, answer=192, burst=36),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one burst or level did. Seconds and tokens.

    Fields:
        level: clients at once; for a burst all of its requests.
        running_peak: most requests that ran at once. retracted: requests taken back.
        token_p95: over requests, p95 of (latency - time to first token) / (tokens - 1).
        throughput: answer tokens per second over the whole run.
        ttft_p50: time to first token. used_peak: pool tokens kept from others at once.
        held_each: pool tokens per pruned request while at least 0.8 of the peak were pruned, median
            over looks; None where nothing is pruned.
        admitted_by_pruning, retractions_avoided, forks: counters of this run.
    """

    level: int
    requests: int
    duration: float
    running_peak: int
    retracted: int
    token_p50: float
    token_p95: float
    throughput: float
    ttft_p50: float
    used_peak: float
    held_each: float | None
    admitted_by_pruning: int
    retractions_avoided: int
    forks: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class CapacityClient:
    """Runs loads against one server."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def burst(self, prompts: Sequence[list[int]], answer: int, exact: bool) -> Load:
        """Everything at once. `exact`: the server knows that no answer ends early, and reserves for
        its whole length; otherwise it reserves less, and may have to take requests back."""
        return asyncio.run(self._run(prompts, answer, len(prompts), exact))

    def level(self, prompts: Sequence[list[int]], answer: int, clients: int) -> Load:
        """A closed loop of `clients` over the prompts."""
        return asyncio.run(self._run(prompts, answer, clients, True))

    async def _run(
        self, prompts: Sequence[list[int]], answer: int, clients: int, exact: bool
    ) -> Load:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            self._base_url, timeout=timeout, connector=connector
        ) as http:
            async with http.post("/flush_cache") as flushed:
                flushed.raise_for_status()
            before = await _state(http)
            begin = time.perf_counter()
            sampler = PoolSampler(http, begin, SAMPLE_S)
            states: list[dict[str, Any]] = []
            watchers = [asyncio.create_task(sampler.run())]
            if before:
                watchers.append(asyncio.create_task(_watch(http, states)))
            waiting = iter(prompts)

            async def client() -> list[dict[str, Any]]:
                return [await _send(http, prompt, answer, exact) for prompt in waiting]

            done = await asyncio.gather(*(client() for _ in range(clients)))
            duration = time.perf_counter() - begin
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            after = await _state(http)
        records = [record for part in done for record in part]
        return load_of(clients, duration, records, sampler.samples, states, before, after)


def load_of(
    level: int,
    duration: float,
    records: Sequence[dict[str, Any]],
    samples: Sequence[PoolSample],
    states: Sequence[dict[str, Any]],
    before: dict[str, Any],
    after: dict[str, Any],
) -> Load:
    """Sum up one run from what was seen of it."""
    peak = max((int(sample.running) for sample in samples), default=0)
    each = [
        (state["retained_pages"] + state["held_pages"]) * PAGE_SIZE / state["pruned_rows"]
        for state in states
        if state["pruned_rows"] and state["pruned_rows"] >= 0.8 * peak
    ]
    per_token = [record["per_token"] for record in records]
    return Load(
        level=level,
        requests=len(records),
        duration=duration,
        running_peak=peak,
        retracted=sum(record["retractions"] for record in records),
        token_p50=float(np.percentile(per_token, 50)),
        token_p95=float(np.percentile(per_token, 95)),
        throughput=sum(record["tokens"] for record in records) / duration,
        ttft_p50=float(np.percentile([record["ttft"] for record in records], 50)),
        used_peak=max((sample.used for sample in samples), default=0.0),
        held_each=float(np.median(each)) if each else None,
        admitted_by_pruning=_grown(before, after, "admitted_by_pruning"),
        retractions_avoided=_grown(before, after, "retractions_avoided"),
        forks=after["forks"]["committed"] - before["forks"]["committed"] if before else 0,
    )


def _grown(before: dict[str, Any], after: dict[str, Any], name: str) -> int:
    return int(after.get(name, 0) - before.get(name, 0))


async def _state(http: aiohttp.ClientSession) -> dict[str, Any]:
    """Counters of the runtime; empty where nothing is pruned."""
    async with http.get("/server_info") as answer:
        found: dict[str, Any] = (await answer.json())["internal_states"][0].get("vtoken", {})
    return found


async def _watch(http: aiohttp.ClientSession, states: list[dict[str, Any]]) -> None:
    while True:
        # A missed look is a missing point; the requests' own errors are raised.
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            states.append(await _state(http))
        await asyncio.sleep(STATE_S)


async def _send(
    http: aiohttp.ClientSession, prompt: list[int], count: int, exact: bool
) -> dict[str, Any]:
    """Stream one greedy answer. Raises ClientError or ValueError when it is not complete."""
    length = {"ignore_eos": True} if exact else {"min_new_tokens": count}
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"max_new_tokens": count, "temperature": 0, **length},
    }
    timer, last = await stream_generate(http, body)
    tokens = len(last.get("output_ids", ()))
    if tokens != count:
        raise ValueError(f"{tokens} tokens came back, {count} were asked for: {last}")
    return {
        "tokens": tokens,
        "ttft": timer.ttft_s,
        "per_token": (timer.latency_s - timer.ttft_s) / (tokens - 1),
        "retractions": int(last["meta_info"].get("num_retractions") or 0),
    }
