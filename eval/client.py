"""Send a workload to one server and time every token.

One asyncio loop per run: each lane is a closed loop over its sessions, each request streams.
Times are taken when a chunk of the stream arrives. A chunk usually holds one token; when the
server sends several at once, the gap before it is shared equally between them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from .sampling import PoolSample, PrunedSample, Sampler
from .workloads.base import Session, Workload

LANE_OFFSET_S = 0.02  # keeps the order of the first arrivals the same in every arm
READ_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it.

    Fields:
        session, turn: which request (turn counted from 0).
        prompt_hash: first 16 hex digits of sha256 over the prompt ids.
        prompt_tokens, cached_tokens: prompt length, and how much of it the server had cached.
        sent_s: when it was sent, seconds after the run began.
        ttft_s: from sending to the first token; latency_s: to the last.
        gaps_s: time between successive tokens, one fewer than tokens.
        output_ids: generated token ids.
        queue_s: time the server kept it waiting before it first ran.
        retractions: how often the server took the request back out of its batch.
        error: empty, or why the request counts as failed.
    """

    session: int
    turn: int
    prompt_hash: str
    prompt_tokens: int
    cached_tokens: int = 0
    sent_s: float = 0.0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    output_ids: tuple[int, ...] = ()
    queue_s: float = 0.0
    retractions: int = 0
    error: str = ""

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return len(self.output_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """Everything measured in one run: requests in (session, turn) order, samples over time."""

    records: tuple[RequestRecord, ...]
    pool: tuple[PoolSample, ...]
    duration_s: float
    pruned: tuple[PrunedSample, ...] = ()


def hash_ids(token_ids: Sequence[int]) -> str:
    """Short fingerprint of a token sequence."""
    return hashlib.sha256(json.dumps(list(token_ids)).encode()).hexdigest()[:16]


class StreamTimer:
    """Turn stream chunks (arrival time, tokens so far) into time to first token and gaps."""

    def __init__(self, sent: float) -> None:
        self._sent, self._last, self._tokens = sent, sent, 0
        self.ttft_s = 0.0
        self.gaps_s: list[float] = []

    def chunk(self, now: float, tokens: int) -> None:
        """Record a chunk after which `tokens` tokens have arrived in total."""
        new = tokens - self._tokens
        if new <= 0:
            return
        if self._tokens == 0:
            self.ttft_s = now - self._sent
            self.gaps_s += [0.0] * (new - 1)
        else:
            self.gaps_s += [(now - self._last) / new] * new
        self._tokens, self._last = tokens, now

    @property
    def latency_s(self) -> float:
        return self._last - self._sent


class LoadClient:
    """Runs workloads against one server.

    Args:
        options: this package's options of every request (`custom_params["vtoken"]`); none: the
            server's own hold. A seed among them is that of the first session; the others count on,
            so that a policy that draws does not draw the same everywhere.
    """

    def __init__(
        self,
        base_url: str,
        sample_interval: float,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._base_url, self._sample_interval = base_url, sample_interval
        self._options = dict(options or {})

    def run(self, workload: Workload, on_request: Callable[[], None] = lambda: None) -> RunTrace:
        """Send every request of the workload; `on_request` is called after each.

        Failed requests are recorded, not raised; a session stops at its first failure.
        """
        return asyncio.run(self._run(workload, on_request))

    async def _run(self, workload: Workload, on_request: Callable[[], None]) -> RunTrace:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=READ_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            self._base_url, timeout=timeout, connector=connector
        ) as http:
            begin = time.perf_counter()
            sampler = Sampler(http, begin, self._sample_interval)
            sampling = asyncio.create_task(sampler.run())
            lanes: list[list[Session]] = [[] for _ in range(workload.lanes)]
            for session in workload.sessions:
                lanes[session.lane].append(session)
            try:
                done = await asyncio.gather(
                    *(
                        self._lane(http, begin, number, lane, on_request)
                        for number, lane in enumerate(lanes)
                    )
                )
                duration = time.perf_counter() - begin
            finally:
                sampling.cancel()
                await asyncio.gather(sampling, return_exceptions=True)
        records = sorted((r for lane in done for r in lane), key=lambda r: (r.session, r.turn))
        return RunTrace(
            records=tuple(records),
            pool=tuple(sampler.pool),
            duration_s=duration,
            pruned=tuple(sampler.pruned),
        )

    async def _lane(
        self,
        http: aiohttp.ClientSession,
        begin: float,
        number: int,
        sessions: Sequence[Session],
        on_request: Callable[[], None],
    ) -> list[RequestRecord]:
        if sessions[0].arrival_s is None:
            await asyncio.sleep(number * LANE_OFFSET_S)
        records: list[RequestRecord] = []
        for session in sessions:
            if session.arrival_s is not None:
                await asyncio.sleep(max(0.0, begin + session.arrival_s - time.perf_counter()))
            prompt, options = list(session.first_prompt), dict(self._options)
            if "seed" in options:
                options["seed"] += session.session
            for turn in range(session.turns):
                record = await send(http, begin, session, turn, prompt, options)
                records.append(record)
                on_request()
                if record.error:
                    break
                if turn < len(session.later_turns):
                    prompt += [*record.output_ids, *session.later_turns[turn]]
        return records


async def send(
    http: aiohttp.ClientSession,
    begin: float,
    session: Session,
    turn: int,
    prompt: Sequence[int],
    options: Mapping[str, Any] | None = None,
) -> RequestRecord:
    """Stream one greedy answer of exactly the planned length and record its times."""
    out_tokens = session.answer_tokens[turn]
    sampling: dict[str, Any] = {
        "max_new_tokens": out_tokens, "temperature": 0, "ignore_eos": True
    }  # fmt: skip
    if options:
        sampling["custom_params"] = {"vtoken": dict(options)}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    sent = time.perf_counter()
    timer, error = StreamTimer(sent), ""
    last: dict[str, Any] = {}
    try:
        async with http.post("/generate", json=body) as answer:
            if answer.status != 200:
                error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
            async for line in answer.content:  # nothing is left of an error's body
                chunk = parse_event(line)
                if chunk is not None:
                    error = error or str(chunk.get("error", "") or "")
                    timer.chunk(time.perf_counter(), len(chunk.get("output_ids", ())))
                    last = chunk
    except (aiohttp.ClientError, TimeoutError, OSError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    meta = last.get("meta_info", {})
    output_ids = tuple(last.get("output_ids", ()))
    if not error and len(output_ids) != out_tokens:
        error = f"{len(output_ids)} tokens came back, {out_tokens} were asked for"
    return RequestRecord(
        session=session.session,
        turn=turn,
        prompt_hash=hash_ids(prompt),
        prompt_tokens=len(prompt),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        sent_s=sent - begin,
        ttft_s=timer.ttft_s,
        latency_s=timer.latency_s,
        gaps_s=tuple(timer.gaps_s),
        output_ids=output_ids,
        queue_s=float(meta.get("queue_time") or 0.0),
        retractions=int(meta.get("num_retractions") or 0),
        error=error,
    )


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The JSON object of one `data:` line of an event stream, None for any other line."""
    if not line.startswith(b"data:"):
        return None
    payload = line[5:].strip()
    if payload == b"[DONE]":
        return None
    decoded = json.loads(payload)
    return decoded if isinstance(decoded, dict) else None
