"""Requests under every policy on one server, and the plain model's account of who had to die."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor
from vtoken_sglang_eval.eager_attention import EagerReference, expected_evicted, unexplained
from vtoken_sglang_eval.policy_reference import SCORES, Observed

from tests.helpers.masked_reference import Trace, evictions_of, read_trace
from tests.helpers.server import PRODUCT, ServerProcess
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS, Configuration
from tests.served.mix import Answer, Case, Mix, run_mix
from tests.served.pruned_mix import pruned_case

SINK, RECENT = 4, 16
NO_POSTS: Mapping[str, tuple[str, Any]] = MappingProxyType({})

# What float32 may move: sums of weights by rounding; counts, where a weight is all but equal to
# the equal share, by a few (head, layer) pairs of the 270; ranks, where scores are all but equal,
# by a few places of the 100 or so live tokens.
TOLERANCE = {name: 2e-5 for name in SCORES} | {
    "scissorhands": 3 / 270,
    "keydiff_local": 3 / 100,
    "keydiff_snapkv": 3 / 100,
}


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One server after its requests.

    Fields:
        answers, trace: by case name. state: the runtime's counters. log: what the server wrote.
        responses: (status, body) of further requests, by name.
    """

    answers: dict[str, Answer]
    trace: Trace
    state: dict[str, Any]
    log: str
    responses: dict[str, tuple[int, str]]


def policy_case(name: str, prompt: list[int], count: int, policy: str, **options: Any) -> Case:
    plain: dict[str, Any] = {"keep": 0.5, "sink": SINK, "recent": RECENT, "interval": 8}
    return pruned_case(name, prompt, count, policy=policy, **{**plain, **options})


def serve_policies(
    configuration: Configuration,
    cases: Sequence[Case],
    model_path: Path,
    folder: Path,
    *flags: str,
    environment: dict[str, str] | None = None,
    posts: Mapping[str, tuple[str, Any]] = NO_POSTS,
) -> PolicyRun:
    """Start a server whose default prunes nothing in practice, send the cases one by one, then
    `posts`, (path, body) by name."""
    trace, log = folder / "trace.jsonl", folder / "server.log"
    command = ["--model-path", str(model_path), *POOL_FLAGS, *configuration.flags()]
    command += ["--vtoken-policy", "streaming_llm", "--vtoken-keep", "1.0", "--vtoken-check"]
    command += ["--vtoken-trace", str(trace), *flags]
    settings = {**STRICT_CHECKS, **(environment or {})}
    with ServerProcess(command, log=log, entry=PRODUCT, environment=settings) as server:
        answers = run_mix(server, Mix(list(cases), [], [], []))
        responses = {}
        for name, (path, body) in posts.items():
            response = server.post(path, body)
            responses[name] = (response.status_code, response.text)
        (state,) = server.get("/server_info").json()["internal_states"]
    text = log.read_text("utf-8")
    return PolicyRun(answers, read_trace(trace), state["vtoken"], text, responses)


def check_evictions(
    reference: EagerReference,
    case: Case,
    run: PolicyRun,
    *,
    page_size: int,
    chunk: int | None,
    layers: Sequence[int] | None = None,
    every: int = 1,
    seed: Tensor | None = None,
) -> list[str]:
    """What of a request's evictions the plain model does not account for, as lines."""
    options = case.sampling["custom_params"]["vtoken"]
    evictions, cached = run.trace.get(case.name, []), run.answers[case.name].cached
    if not evictions:
        return [f"{case.name}: nothing was evicted"]
    seen = observe(reference, case, run, chunk=chunk, layers=layers, every=every)
    seen = replace(seen, page_size=page_size)
    if seed is not None:
        seen = replace(seen, seed=seed)
    lines: list[str] = []
    dead: set[int] = set()
    for eviction in evictions:
        length, open_page = eviction.logical_len, None
        if chunk is not None and length < len(case.prompt):
            open_page = last_chunk_start(cached, length, chunk)
        choice = expected_evicted(
            SCORES[options["policy"]](seen, length),
            [pos for pos in range(length) if pos not in dead],
            length=length,
            kept=math.ceil(round(options["keep"] * length, 6)),
            sink=options["sink"],
            recent=options["recent"],
            page_size=page_size,
            eligible_below=open_page,
        )
        found = unexplained(choice, eviction.evicted, TOLERANCE[options["policy"]])
        lines += [f"{case.name} at {length}: {line}" for line in found]
        dead.update(eviction.evicted)
    return lines


def observe(
    reference: EagerReference,
    case: Case,
    run: PolicyRun,
    *,
    chunk: int | None,
    layers: Sequence[int] | None = None,
    every: int = 1,
) -> Observed:
    """The plain model's attention over a request and its answer, under its evictions."""
    answer = run.answers[case.name]
    ids = [*case.prompt, *answer.tokens]
    evictions = evictions_of(run.trace.get(case.name, []))
    return reference.observe(
        ids,
        {query: dead for query, dead in evictions.items() if query < len(ids)},
        first_query=answer.cached,
        last_chunk=(last_chunk_start(answer.cached, len(case.prompt), chunk), len(case.prompt)),
        layers=layers,
        every=every,
    )


def last_chunk_start(cached: int, prompt_len: int, chunk: int | None) -> int:
    """First query of the prompt's last chunk, for a request alone on the server."""
    if chunk is None:
        return cached
    return cached + (prompt_len - cached - 1) // chunk * chunk
