"""Numbers from one run. Percentiles interpolate linearly between samples."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy

from .chat import ChatTokenizer
from .client import RequestRecord, RunTrace
from .sampling import PoolSample
from .workloads.base import Workload

PERCENTILES = (50, 95, 99)


def distribution(name: str, values: Sequence[float]) -> dict[str, float]:
    """`name_mean`, `name_p50`, `name_p95`, `name_p99`; nothing for no values."""
    if not values:
        return {}
    points = numpy.percentile(numpy.asarray(values, dtype=numpy.float64), PERCENTILES)
    named = {f"{name}_p{at}": float(p) for at, p in zip(PERCENTILES, points, strict=True)}
    return {f"{name}_mean": float(numpy.mean(values)), **named}


def output_hash(records: Sequence[RequestRecord]) -> str:
    """sha256 over the generated ids of all requests, in (session, turn) order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps([record.session, record.turn, list(record.output_ids)]).encode())
    return digest.hexdigest()


def tpot(record: RequestRecord) -> float:
    """Time per output token after the first, in seconds; needs two tokens."""
    return (record.latency_s - record.ttft_s) / (record.tokens - 1)


def pool_use(samples: Sequence[PoolSample]) -> dict[str, float]:
    """What the gauges show while requests run; empty where there are no gauges.

    `held_tokens` is the mean of used tokens, `held_per_request` that over running requests: their
    private pages and their share of the cached ones they lock, each locked page counted once.
    """
    busy = [sample for sample in samples if sample.running]
    if not busy:
        return {}
    running = sum(sample.running for sample in busy)
    return {
        "held_per_request": sum(sample.used for sample in busy) / running,
        "held_tokens": sum(sample.used for sample in busy) / len(busy),
        "peak_held_tokens": max(sample.used for sample in busy),
        "cached_tokens_idle": sum(sample.evictable for sample in busy) / len(busy),
        "running": running / len(busy),
        "peak_running": max(sample.running for sample in busy),
        "queued": sum(sample.queued for sample in busy) / len(busy),
    }


def goodput(records: Sequence[RequestRecord], ttft: float, per_token: float) -> int:
    """Requests within both limits, in seconds; a limit of 0 does not count."""
    return sum(
        (not ttft or record.ttft_s <= ttft)
        and (not per_token or record.tokens < 2 or tpot(record) <= per_token)
        for record in records
    )


def summarize(
    trace: RunTrace, cpu_s: float | None, slo: tuple[float, float] = (0.0, 0.0)
) -> dict[str, Any]:
    """Figures of one run. Times in seconds, rates per second of the run's duration.

    Failed requests count in `failed` and nowhere else. `e2e` is the time from sending a request
    to its last token; `itl` is the time between two tokens, `tpot` its mean within a request;
    `queue` is the time the server let a request wait. `computed_tokens` are prompt tokens that
    were not cached.

    Args:
        cpu_s: CPU time of all server processes, None where unknown.
        slo: limits of a good request, see `goodput`; `goodput` is left out without them.
    """
    good = [record for record in trace.records if not record.error]
    tokens = sum(record.tokens for record in good)
    prompt = sum(record.prompt_tokens for record in good)
    cached = sum(record.cached_tokens for record in good)
    found: dict[str, Any] = {
        "requests": len(good),
        "failed": len(trace.records) - len(good),
        "duration_s": trace.duration_s,
        "tokens_per_s": tokens / trace.duration_s,
        "requests_per_s": len(good) / trace.duration_s,
        "output_tokens": tokens,
        "prompt_tokens": prompt,
        "computed_tokens": prompt - cached,
        "cached_share": cached / prompt if prompt else 0.0,
        **distribution("ttft", [record.ttft_s for record in good]),
        **distribution("itl", [gap for record in good for gap in record.gaps_s]),
        **distribution("e2e", [record.latency_s for record in good]),
        **distribution("tpot", [tpot(record) for record in good if record.tokens > 1]),
        **distribution("queue", [record.queue_s for record in good]),
        "retractions": sum(record.retractions for record in good),
        **pool_use(trace.pool),
        "output_sha256": output_hash(trace.records),
    }
    if any(slo):
        found["goodput"] = goodput(good, *slo) / trace.duration_s
    if cpu_s is not None and tokens:
        found["cpu_ms_per_token"] = 1000 * cpu_s / tokens
    return found


def contains(answer: str, expected: str) -> bool:
    """Whether `expected` stands in the answer, letter case ignored, not inside a longer word."""
    found = re.search(rf"(?<!\w){re.escape(expected.strip())}(?!\w)", answer, re.IGNORECASE)
    return bool(expected.strip()) and found is not None


def recall(
    workload: Workload, records: Sequence[RequestRecord], tokenizer: ChatTokenizer
) -> list[bool]:
    """Of every question whose answer is known, whether one of the right texts stands in it."""
    right = []
    for record in records:
        expected = workload.sessions[record.session].expected
        texts = expected[record.turn] if expected else ()
        if texts and not record.error:
            answer = tokenizer.decode(record.output_ids)
            right.append(any(contains(answer, text) for text in texts))
    return right
