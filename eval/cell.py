"""One cell of a comparison: one arm's requests, sent to a server that is already running."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from .arms import Arm
from .chat import ChatTokenizer
from .client import LoadClient, RunTrace
from .config import EvalConfig
from .counters import LookSampler, private_memory, read_block, totals
from .errors import ServerError
from .generated_shared_prefix import run_client
from .metrics import summarize
from .pool import PoolSampler
from .scoring import recall
from .server import SETTLE_S, ServerProcess
from .workload import Session, Workload

WARM_UP_TOKENS = 8
FLUSH_TIMEOUT_S = 30.0
FLUSH_TRIES = 10


def warm_up_workload(workload: Workload) -> Workload:
    """One short session of two turns whose ids occur in no measured prompt's beginning."""
    first = tuple(reversed(workload.sessions[0].first_prompt))
    session = Session(
        session=0,
        lane=0,
        first_prompt=first,
        later_turns=(first[:16],),
        answer_tokens=(WARM_UP_TOKENS, WARM_UP_TOKENS),
    )
    return Workload(name="warm-up", sessions=(session,))


def flush_cache(base_url: str, tries: int = 1) -> None:
    """Empty the server's prefix cache, so that earlier requests leave nothing to hit.

    Raises:
        ServerError: the server refused, `tries` times half a second apart.
    """
    request = urllib.request.Request(f"{base_url}/flush_cache", method="POST")
    for attempt in range(tries):
        try:
            with urllib.request.urlopen(request, timeout=FLUSH_TIMEOUT_S) as answer:
                answer.read()
                return
        except OSError as error:
            if attempt + 1 == tries:
                raise ServerError(f"the server did not flush its cache: {error}") from error
            time.sleep(0.5)


def warm_up(server: ServerProcess, workload: Workload, config: EvalConfig) -> None:
    """Send the warm-up session and forget it.

    Raises:
        ServerError: a request failed, or the server ended.
    """
    client = LoadClient(server.base_url, config.sample_interval)
    require_answers(server, client.run(warm_up_workload(workload)))
    flush_cache(server.base_url)


def require_answers(server: ServerProcess, trace: RunTrace) -> None:
    """Raise ServerError if a warm-up request failed."""
    for record in trace.records:
        if record.error:
            server.require_alive("during warm-up", SETTLE_S)
            raise server.error(f"warm-up request failed: {record.error}")


def measure(
    server: ServerProcess,
    workload: Workload,
    arm: Arm,
    config: EvalConfig,
    tokenizer: ChatTokenizer,
    *,
    options: dict[str, Any],
    look: bool,
    kv_bytes: int,
    folder: Path,
    on_request: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run the workload once and return summary, requests and samples as plain data.

    Args:
        options: this package's options of every request; empty where the server has them.
        look: whether to sample this package's counters; the same for all arms of a comparison.
        kv_bytes: K and V of one token in all layers.
        folder: where SGLang's benchmark may leave its output.

    Raises:
        ServerError: the server ended, or the benchmark's client failed.
    """
    before, cpu_before = (read_block(server.base_url) if look else None), server.cpu_seconds()
    if workload.bench is not None:
        trace = asyncio.run(_watch_bench(server.base_url, workload, options, config, look, folder))
    else:
        client = LoadClient(server.base_url, config.sample_interval, options, look)
        trace = client.run(workload, on_request)
    cpu_s = server.cpu_seconds() - cpu_before
    failed = any(record.error for record in trace.records)
    server.require_alive("while it was measured", SETTLE_S if failed else 0.0)
    page_size = arm.page_size or config.page_size
    added = totals(before, read_block(server.base_url) if before is not None else None)
    if added:
        added["copied_bytes"] = added["moved_tokens"] * kv_bytes
    return {
        "summary": {
            **summarize(trace, cpu_s),
            **private_memory(trace.looks, page_size),
            **added,
            **recall(workload, trace.records, tokenizer),
        },
        "requests": [asdict(record) for record in trace.records],
        "pool": [asdict(sample) for sample in trace.pool],
        "looks": [asdict(item) for item in trace.looks],
    }


async def _watch_bench(
    base_url: str,
    workload: Workload,
    options: dict[str, Any],
    config: EvalConfig,
    look: bool,
    folder: Path,
) -> RunTrace:
    """Run SGLang's benchmark in a thread and sample the server meanwhile."""
    assert workload.bench is not None
    timeout = aiohttp.ClientTimeout(total=None, sock_read=FLUSH_TIMEOUT_S)
    async with aiohttp.ClientSession(base_url, timeout=timeout) as http:
        begin = time.perf_counter()
        sampler = PoolSampler(http, begin, config.sample_interval)
        looker = LookSampler(http, begin, config.sample_interval)
        tasks = [asyncio.create_task(sampler.run())]
        if look:
            tasks.append(asyncio.create_task(looker.run()))
        try:
            records, duration_s = await asyncio.to_thread(
                run_client, workload.bench, base_url, options, folder
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return RunTrace(
        records=tuple(records),
        pool=tuple(sampler.samples),
        duration_s=duration_s,
        looks=tuple(looker.looks),
    )
