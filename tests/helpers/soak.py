"""Many requests of many kinds at once against one server, and what became of each."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from tests.helpers.server import ServerProcess
from vtoken_sglang.options import OPTIONS

Ending = Literal["length", "stop", "abort", "disconnect", "several"]

_ENDINGS: tuple[Ending, ...] = ("length", "length", "length", "stop", "abort", "disconnect")
_LONGEST_PROMPT = 420
_VOCABULARY = range(200, 40_000)


@dataclass(frozen=True, slots=True)
class SoakRequest:
    """One request.

    Fields:
        ending: how it is meant to end: at its length, at a stop token, aborted by request id
            while it runs, by a client that hangs up, or at its length with n = 2 answers.
        body: of /generate; its "rid" is unique.
        tokens: tokens asked for.
        delay: seconds (or, for a client that hangs up, streamed events) before the abort.
    """

    ending: Ending
    body: dict[str, Any]
    tokens: int
    delay: float


def soak_requests(count: int, seed: int) -> list[SoakRequest]:
    """Draw requests: half of them share one of a few prefixes, all option values occur."""
    draw = random.Random(seed)
    prefixes = [draw.sample(_VOCABULARY, draw.randint(40, 200)) for _ in range(5)]
    # SGLang aborts every request whose id starts with the one given: all ids are equally long.
    return [_request(draw, f"soak-{seed}-{index:05}", prefixes) for index in range(count)]


def _request(draw: random.Random, rid: str, prefixes: Sequence[list[int]]) -> SoakRequest:
    ending: Ending = "several" if draw.random() < 0.05 else draw.choice(_ENDINGS)
    prefix = draw.choice(prefixes) if draw.random() < 0.5 else []
    length = draw.randint(1, _LONGEST_PROMPT - len(prefix))
    tokens = draw.choice((1, 2, 15, 16, 17, 40, 40, 64, 90))
    sampling: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": tokens,
        "ignore_eos": ending != "stop",
        "custom_params": {"vtoken": _options(draw)},
    }
    if ending == "several":
        sampling |= {"n": 2, "temperature": 1.0}
    if ending == "stop":  # about one token in six ends it, so most do not reach their length
        sampling |= {"stop_token_ids": draw.sample(_VOCABULARY, 6_000), "temperature": 1.0}
    body = {
        "rid": rid,
        "input_ids": [*prefix, *draw.sample(_VOCABULARY, length)],
        "sampling_params": sampling,
    }
    if ending == "several":
        del body["rid"]  # one id cannot name two answers
    delay = draw.randint(1, 12) if ending == "disconnect" else draw.uniform(0.0, 1.5)
    return SoakRequest(ending, body, tokens, delay)


def _options(draw: random.Random) -> dict[str, Any]:
    policy = draw.choice(("random", "streaming_llm", "none", ""))
    if policy == "none":
        return {"policy": "none"}
    options: dict[str, Any] = {"policy": policy} if policy else {}
    options["interval"] = draw.choice((1, 3, 16))
    options["shared"] = draw.choice(OPTIONS["shared"].kind.choices)
    options["publish"] = draw.choice(OPTIONS["publish"].kind.choices)
    options |= draw.choice(({"keep": 0.3}, {"keep": 0.7}, {"budget": 48}))
    return options


class Soak:
    """Sends requests with `workers` at a time; `outcomes` counts how they ended."""

    def __init__(self, server: ServerProcess, workers: int) -> None:
        self._server, self._workers = server, workers
        self._counting = threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    @property
    def ended(self) -> int:
        with self._counting:
            return self.outcomes.total()

    def start(self, requests: Sequence[SoakRequest]) -> ThreadPoolExecutor:
        """Begin; leaving the returned pool as a context waits for every request."""
        pool = ThreadPoolExecutor(max_workers=self._workers)
        for request in requests:
            pool.submit(self._run, request)
        return pool

    def _run(self, request: SoakRequest) -> None:
        try:
            outcome = self._send(request)
        except Exception as error:
            outcome = "failed"
            with self._counting:
                self.problems.append(f"{request.body.get('rid')} ({request.ending}): {error!r}")
        with self._counting:
            self.outcomes[outcome] += 1

    def _send(self, request: SoakRequest) -> str:
        if request.ending == "disconnect":
            for count, _ in enumerate(self._server.stream(request.body), start=1):
                if count >= request.delay:
                    return "hung up"
            return "length"
        timer = threading.Timer(request.delay, self._abort, [request.body.get("rid")])
        if request.ending == "abort":
            timer.start()
        try:
            answer = self._server.generate(request.body)
        finally:
            timer.cancel()
        answers = answer if request.ending == "several" else [answer]
        for one in answers:
            self._judge(request, one["meta_info"])
        return str(answers[0]["meta_info"]["finish_reason"]["type"])

    def _abort(self, rid: str) -> None:
        self._server.post("/abort_request", {"rid": rid})

    def _judge(self, request: SoakRequest, meta: dict[str, Any]) -> None:
        kind, got = meta["finish_reason"]["type"], meta["completion_tokens"]
        allowed = {"abort": ("abort", "length"), "stop": ("stop", "length")}
        assert kind in allowed.get(request.ending, ("length",)), f"ended with {kind}"
        if kind == "length":
            assert got == request.tokens, f"{got} tokens, asked for {request.tokens}"
