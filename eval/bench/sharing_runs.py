"""One burst of requests over shared prefixes, under one strategy, on a server that serves them all.

A run is `requests` requests sent at once. Every `degree` of them share a prefix of `prefix` tokens;
each has a tail of its own. The cache is empty at the start, so the first of each group computes its
prefix and the others may hit it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import numpy as np
from vtoken_sglang_eval.client import hash_ids, stream_generate
from vtoken_sglang_eval.metrics import distribution
from vtoken_sglang_eval.pool import PoolSampler

STRATEGIES = ("none", "skip", "mask", "cow", "auto")
TAIL, ANSWER, PROBE_ANSWER = 32, 48, 8
SAMPLE_S = 0.1
VOCABULARY = range(200, 40_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is asked.

    Fields:
        degree: requests per prefix. prefix: its tokens. keep: share of its tokens a request keeps.
        least: requests sent even if that takes several prefixes.
        policy: `random` keeps other tokens in every request, `streaming_llm` the same in all whose
            length is the same.
    """

    degree: int
    prefix: int
    keep: float
    policy: str
    least: int

    @property
    def requests(self) -> int:
        return max(self.least, self.degree)

    @property
    def name(self) -> str:
        return f"degree{self.degree}_prefix{self.prefix}_keep{round(self.keep * 100)}_{self.policy}"

    def prompts(self, seed: int) -> list[list[int]]:
        """Token ids of all requests; drawn, since only their lengths and sharing matter here."""
        draw = random.Random(f"{self.name} {seed}")
        groups = -(-self.requests // self.degree)
        prefixes = [draw.choices(VOCABULARY, k=self.prefix) for _ in range(groups)]
        return [
            prefixes[at // self.degree] + draw.choices(VOCABULARY, k=TAIL)
            for at in range(self.requests)
        ]

    def options(self, strategy: str, at: int) -> dict[str, Any]:
        """Of request `at`. Equal seeds decide equal evictions, whatever the strategy."""
        if strategy == "none":
            return {"policy": "none"}
        return {"policy": self.policy, "keep": self.keep, "seed": at, "shared": strategy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one strategy did in one cell. Times in seconds, memory in tokens of the pool.

    Fields:
        used_mean, used_peak: tokens that running requests keep from being given to others: their
            private pages and the cached ones they lock, each once; over the samples of the gauge.
        used_each: the same per running request, summed over the samples.
        running_mean: requests running at once. cached_share: of the prompt tokens.
        cpu_s: time of the server's processes. forks: committed. moved: tokens copied.
        retracted: requests taken back. answers: fingerprint of the generated ids, per request.
        probe: ids of an unpruned request over the first prefix, alone, afterwards.
    """

    strategy: str
    duration: float
    throughput: float
    ttft_p50: float
    ttft_p95: float
    e2e_p95: float
    used_mean: float
    used_peak: float
    used_each: float
    running_mean: float
    cached_share: float
    cpu_s: float
    forks: int
    moved: int
    retracted: int
    answers: list[str]
    probe: list[int]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class SharingClient:
    """Runs cells against one server; `cpu_seconds` says what its processes have used so far."""

    def __init__(self, base_url: str, cpu_seconds: Any) -> None:
        self._base_url, self._cpu_seconds = base_url, cpu_seconds

    def run(self, cell: Cell, strategy: str, seed: int) -> Run:
        """Flush the cache, send the burst, then the probe."""
        return asyncio.run(self._run(cell, strategy, seed))

    async def _run(self, cell: Cell, strategy: str, seed: int) -> Run:
        prompts = cell.prompts(seed)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(self._base_url, timeout=timeout) as http:
            async with http.post("/flush_cache") as answer:
                answer.raise_for_status()
            before = await _state(http)
            cpu, begin = self._cpu_seconds(), time.perf_counter()
            sampler = PoolSampler(http, begin, SAMPLE_S)
            sampling = asyncio.create_task(sampler.run())
            records = await asyncio.gather(
                *(
                    _send(http, prompt, ANSWER, cell.options(strategy, at))
                    for at, prompt in enumerate(prompts)
                )
            )
            duration = time.perf_counter() - begin
            cpu = self._cpu_seconds() - cpu
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            after = await _state(http)
            asked = [*prompts[0][: cell.prefix], *VOCABULARY[:8]]
            probe = await _send(http, asked, PROBE_ANSWER, {"policy": "none"})
        busy = [sample for sample in sampler.samples if sample.running]
        return Run(
            strategy=strategy,
            duration=duration,
            throughput=len(records) / duration,
            ttft_p50=distribution([r["ttft"] for r in records])["p50"],
            ttft_p95=distribution([r["ttft"] for r in records])["p95"],
            e2e_p95=distribution([r["latency"] for r in records])["p95"],
            used_mean=float(np.mean([s.used for s in busy])),
            used_peak=max(s.used for s in busy),
            used_each=sum(s.used for s in busy) / sum(s.running for s in busy),
            running_mean=float(np.mean([s.running for s in busy])),
            cached_share=sum(r["cached"] for r in records) / sum(map(len, prompts)),
            cpu_s=cpu,
            forks=after["forks"]["committed"] - before["forks"]["committed"],
            moved=after["moved_tokens"] - before["moved_tokens"],
            retracted=sum(r["retractions"] for r in records),
            answers=[hash_ids(r["tokens"]) for r in records],
            probe=probe["tokens"],
        )


async def _state(http: aiohttp.ClientSession) -> Mapping[str, Any]:
    async with http.get("/server_info") as answer:
        state: Mapping[str, Any] = (await answer.json())["internal_states"][0]["vtoken"]
    return state


async def _send(
    http: aiohttp.ClientSession, prompt: list[int], count: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Stream one greedy answer. Raises ClientError or ValueError when it is not complete."""
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {
            "max_new_tokens": count,
            "temperature": 0,
            "ignore_eos": True,
            "custom_params": {"vtoken": options},
        },
    }
    timer, last = await stream_generate(http, body)
    tokens = list(last.get("output_ids", ()))
    if len(tokens) != count:
        raise ValueError(f"{len(tokens)} tokens came back, {count} were asked for: {last}")
    meta = last["meta_info"]
    return {
        "ttft": timer.ttft_s,
        "latency": timer.latency_s,
        "cached": int(meta.get("cached_tokens") or 0),
        "retractions": int(meta.get("num_retractions") or 0),
        "tokens": tokens,
    }
