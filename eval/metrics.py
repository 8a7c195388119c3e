"""Numbers from one run, and from several. Percentiles interpolate linearly between samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from .client import RequestRecord, RunTrace
from .pool import PoolSample

PERCENTILES = (50, 95, 99)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p95, p99 and count; an empty sample gives count 0 only."""
    if not values:
        return {"count": 0}
    points = numpy.percentile(numpy.asarray(values, dtype=numpy.float64), PERCENTILES)
    named = {f"p{level}": float(point) for level, point in zip(PERCENTILES, points, strict=True)}
    return {"count": len(values), "mean": float(numpy.mean(values)), **named}


def spread(values: Sequence[float]) -> dict[str, float]:
    """median, min, max, q1 and q3 of a figure over repeats.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("values: at least one is needed, got none")
    array = numpy.asarray(values, dtype=numpy.float64)
    q1, median, q3 = numpy.percentile(array, (25, 50, 75))
    return {
        "median": float(median),
        "min": float(array.min()),
        "max": float(array.max()),
        "q1": float(q1),
        "q3": float(q3),
    }


def figure(values: Sequence[float], unit: str) -> dict[str, Any]:
    """An entry of a figures file: median over repeats, with quartiles and extremes."""
    found = spread(values)
    shown = {key: found[key] for key in ("min", "q1", "q3", "max")}
    return {"value": found["median"], "unit": unit, "spread": shown}


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
    """What running requests keep from others, over the samples in which any ran; else empty.

    `used_tokens_per_request` holds a request's private pages and its share of the cached ones that
    requests lock, each locked page counted once.
    """
    busy = [sample for sample in samples if sample.running]
    if not busy:
        return {}
    running = sum(sample.running for sample in busy)
    return {
        "used_tokens_per_request": sum(sample.used for sample in busy) / running,
        "mean_running": running / len(busy),
        "mean_queued": sum(sample.queued for sample in busy) / len(busy),
    }


def summarize(trace: RunTrace, server_cpu_s: float) -> dict[str, Any]:
    """Figures of one run. Times in seconds, rates per second of the run's duration.

    Failed requests count in `failed` and nowhere else. `e2e` is the time from sending a request
    to its last token; `itl` is the time between two tokens, `tpot` its mean within a request;
    `queue` is the time the server let a request wait; `server_cpu_ms_per_token` is CPU time
    of all server processes per generated token.
    """
    good = [record for record in trace.records if not record.error]
    tokens = sum(record.tokens for record in good)
    prompt = sum(record.prompt_tokens for record in good)
    cached = sum(record.cached_tokens for record in good)
    used = [sample.used for sample in trace.pool]
    return {
        "requests": len(good),
        "failed": len(trace.records) - len(good),
        "duration_s": trace.duration_s,
        "request_throughput": len(good) / trace.duration_s,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / trace.duration_s,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": cached / prompt if prompt else 0.0,
        "ttft": distribution([record.ttft_s for record in good]),
        "itl": distribution([gap for record in good for gap in record.gaps_s]),
        "e2e": distribution([record.latency_s for record in good]),
        "tpot": distribution([tpot(record) for record in good if record.tokens > 1]),
        "queue": distribution([record.queue_s for record in good]),
        "tokens_per_answer": tokens / len(good) if good else 0.0,
        "retractions": sum(record.retractions for record in good),
        **pool_use(trace.pool),
        "peak_used_tokens": max(used, default=0.0),
        "mean_used_tokens": float(numpy.mean(used)) if used else 0.0,
        "peak_running": max((sample.running for sample in trace.pool), default=0.0),
        "peak_queued": max((sample.queued for sample in trace.pool), default=0.0),
        "server_cpu_s": server_cpu_s,
        "server_cpu_ms_per_token": 1000 * server_cpu_s / tokens if tokens else 0.0,
        "output_sha256": output_hash(trace.records),
    }


def figure_at(summary: Mapping[str, Any], path: str) -> float | None:
    """The number at a dotted path such as "e2e.p95"; None where no request gave a sample."""
    value: Any = summary
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else float(value)
