"""Sharers of one prefix under every strategy, on a pool too small for all of them and the cache.

All strategies decide the same evictions, so `mask`, `cow` and `auto` must answer alike; whatever
they do, an unpruned request over the same prefix must answer as on a server that never prunes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.masked_reference import Trace, read_trace
from tests.helpers.reference import Reference
from tests.helpers.server import PRODUCT, ServerProcess
from tests.helpers.server_log import complaints
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS
from tests.served.mix import Answer
from tests.served.sharing import (
    LONE,
    PREFIX,
    SHARERS,
    TEXT,
    Round,
    SharingPrompts,
    fill,
    flush,
    probe,
    run_round,
    sharing_prompts,
    state_of,
    storm,
)
from tests.served.test_soak import gauge

pytestmark = [pytest.mark.server, pytest.mark.slow]

SAME_EVICTIONS = ("mask", "cow", "auto")
# Requests together may be batched differently from run to run and round differently then.
BATCHED_TOLERANCE = 1e-4
POOL = 2048


@dataclass(frozen=True, slots=True)
class SharingRun:
    """One server after a round per strategy and a storm.

    Fields:
        rounds: by strategy. storm: the unpruned probe, alone, after the storm.
        idle: counters when all was over. flushed: the probe after the last flush.
        metrics: Prometheus text at the end. storm_forks: forks of the storm.
    """

    page_size: int
    rounds: dict[str, Round]
    storm: Answer
    idle: dict[str, Any]
    flushed: Answer
    trace: Trace
    log: str
    metrics: str
    storm_forks: int


def flags(model_path: Path, page_size: int) -> list[str]:
    pool = ["--max-total-tokens", str(POOL)]
    sizes = ["--page-size", str(page_size), "--chunked-prefill-size", "128"]
    return ["--model-path", str(model_path), *POOL_FLAGS, *pool, *sizes]


@pytest.fixture(scope="module")
def prompts(reference: Reference) -> SharingPrompts:
    return sharing_prompts(reference.tokenizer.encode(TEXT, add_special_tokens=False))


# `skip` once: what it leaves alone does not depend on the page size. Both of SGLang's tree cores.
PYTHON_CORE = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
RUNS = [(16, ("skip", *SAME_EVICTIONS), {}), (1, SAME_EVICTIONS, PYTHON_CORE)]


@pytest.fixture(scope="module", params=RUNS, ids=["P16", "P1-python-core"])
def run(
    request: pytest.FixtureRequest,
    model_path: Path,
    prompts: SharingPrompts,
    tmp_path_factory: pytest.TempPathFactory,
) -> SharingRun:
    page_size, strategies, core = request.param
    folder = tmp_path_factory.mktemp("sharing")
    log, trace = folder / "server.log", folder / "trace.jsonl"
    options = ["--vtoken-policy", "streaming_llm", "--vtoken-keep", "1.0", "--vtoken-check"]
    options += ["--vtoken-trace", str(trace), "--enable-metrics"]
    with ServerProcess(
        [*flags(model_path, page_size), *options],
        log=log,
        entry=PRODUCT,
        environment=STRICT_CHECKS | core,
    ) as server:
        rounds = {name: run_round(server, prompts, name) for name in strategies}
        calm = state_of(server)["forks"]["committed"]
        storm(server, prompts)
        after_storm = probe(server, prompts)
        idle = state_of(server)
        flush(server)
        flushed = probe(server, prompts)
        metrics = server.get("/metrics").text
    return SharingRun(
        page_size=page_size,
        rounds=rounds,
        storm=after_storm,
        idle=idle,
        flushed=flushed,
        trace=read_trace(trace),
        log=log.read_text("utf-8"),
        metrics=metrics,
        storm_forks=idle["forks"]["committed"] - calm,
    )


@pytest.fixture(scope="module")
def unpruned(
    model_path: Path, prompts: SharingPrompts, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answer]:
    """The probe on a server that prunes nothing: over a cached prefix, and on an empty cache."""
    log = tmp_path_factory.mktemp("unpruned") / "server.log"
    command = [*flags(model_path, 16), "--vtoken-policy", "none"]
    with ServerProcess(command, log=log, entry=PRODUCT, environment=STRICT_CHECKS) as server:
        cold = probe(server, prompts)
        flush(server)
        fill(server, prompts)
        return {"cold": cold, "warm": probe(server, prompts), "hot": probe(server, prompts)}


def difference(left: Answer, right: Answer, tolerance: float) -> str:
    """What differs; empty when the tokens are equal and the log-probabilities close enough."""
    if left.tokens != right.tokens:
        return f"{left.tokens} != {right.tokens}"
    gap = max(abs(a - b) for a, b in zip(left.logprobs, right.logprobs, strict=True))
    return f"log-probabilities differ by {gap:.1e}" if gap > tolerance else ""


def test_strategies_decide_the_same_evictions(run: SharingRun, prompts: SharingPrompts) -> None:
    for name in [*map(str, range(SHARERS)), *LONE]:
        evictions = [run.trace[f"{strategy} {name}"] for strategy in SAME_EVICTIONS]
        assert evictions[0]
        assert evictions.count(evictions[0]) == len(evictions), name
    for at, prompt in enumerate(prompts.sharers):
        shared = len(prompt) // run.page_size * run.page_size
        masked = [pos for e in run.trace[f"mask {at}"] for pos in e.evicted if pos >= shared]
        skipped = [pos for e in run.trace.get(f"skip {at}", []) for pos in e.evicted]
        assert skipped == masked or "skip" not in run.rounds


@pytest.mark.parametrize("strategy", ["cow", "auto"])
def test_copies_answer_like_masks(run: SharingRun, strategy: str) -> None:
    masked, forked = run.rounds["mask"], run.rounds[strategy]
    pairs = [*zip(masked.together, forked.together, strict=True)]
    pairs += [*zip(masked.several, forked.several, strict=True)]
    found = [difference(one, other, BATCHED_TOLERANCE) for one, other in pairs]
    assert [line for line in found if line] == []
    for name, answer in masked.lone.items():
        assert not difference(answer, forked.lone[name], 0.0), name


def test_skip_leaves_the_prefix_to_attention(run: SharingRun) -> None:
    """The strategies are not all the same thing."""
    skip = run.rounds.get("skip")
    assert skip is not None or run.page_size == 1
    if skip is not None:
        assert skip.forks == []
        answers = zip(skip.together, run.rounds["mask"].together, strict=True)
        assert any(difference(skipped, masked, BATCHED_TOLERANCE) for skipped, masked in answers)


def test_forks_happened_and_were_predicted(run: SharingRun) -> None:
    assert run.rounds["mask"].forks == []
    assert len(run.rounds["cow"].forks) >= 8
    done = [record for record in run.rounds["auto"].forks if record["realised_pages"] is not None]
    assert all(record["predicted_pages"] >= 1 for record in done)
    # Among others the pages that become evictable may change while the copy runs; alone they
    # may not.
    alone = [record for record in done if record["rid"] in {f"auto {name}" for name in LONE}]
    assert len(alone) >= len(LONE)
    for record in alone:
        assert record["realised_pages"] == record["predicted_pages"]


def test_the_tree_had_to_evict_and_the_storm_forked(run: SharingRun) -> None:
    assert gauge(run.metrics, "sglang:evicted_tokens_total") > 0
    assert run.storm_forks > 0


def test_lone_requests_hit_the_prefix(run: SharingRun) -> None:
    """Of these one has a hit longer than its budget, two are prefilled in chunks behind it."""
    hit = PREFIX // run.page_size * run.page_size
    for strategy in SAME_EVICTIONS:
        cached = {name: answer.cached for name, answer in run.rounds[strategy].lone.items()}
        assert cached.pop("chunked, private") > hit, "its prompt was published by the one before"
        assert cached == dict.fromkeys(LONE[:3], hit), strategy


def test_an_unpruned_request_never_notices(run: SharingRun, unpruned: dict[str, Answer]) -> None:
    rounds = list(run.rounds.values())
    known = [*unpruned.values(), *rounds[0].before]  # nothing had been pruned then
    probes = [answer for done in rounds for answer in (*done.before, *done.after)]
    for answer in [*probes, run.storm, run.flushed]:
        # Where the same part of the prompt was computed, shapes are the same, and so are the bits.
        same = [other for other in known if other.cached == answer.cached]
        assert len(same) >= (1 if run.page_size == 16 else 0)
        for other in same or [unpruned["warm"]]:
            assert not difference(answer, other, 0.0 if same else 1e-5)
    for answer in [answer for done in rounds for answer in done.neighbour]:
        truth = unpruned["warm"]
        assert answer.tokens[: len(truth.tokens)] == truth.tokens
        gaps = [abs(a - b) for a, b in zip(answer.logprobs, truth.logprobs, strict=False)]
        assert max(gaps) <= BATCHED_TOLERANCE


def test_the_prefix_stays_cached(run: SharingRun, prompts: SharingPrompts) -> None:
    prefix = PREFIX // run.page_size * run.page_size
    whole = (len(prompts.probe) - 1) // run.page_size * run.page_size
    for strategy, done in run.rounds.items():
        assert [answer.cached for answer in done.before] == [prefix, whole], strategy
        assert [answer.cached for answer in done.after] == [whole, prefix], strategy
    assert run.flushed.cached == 0


def test_several_answers_fork_the_same_prompt(run: SharingRun) -> None:
    for strategy in ("mask", "cow", "auto"):
        first, *others = run.rounds[strategy].several
        assert len(others) == 2
        assert not any(difference(first, other, BATCHED_TOLERANCE) for other in others)
    # SGLang names the samples of one request itself; everyone else's name says the strategy.
    records = run.rounds["cow"].forks
    samples = [record for record in records if not record["rid"].startswith("cow ")]
    assert len({record["rid"] for record in samples}) == 3


def test_nothing_is_left_when_idle_and_no_checker_complained(run: SharingRun) -> None:
    for name in ("pruned_rows", "held_pages", "retained_pages", "live_private_tokens"):
        assert run.idle[name] == 0
    assert complaints(run.log) == []
