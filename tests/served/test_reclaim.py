"""Evictions reclaimed and repacked answer like evictions merely masked, here and in
transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.masked_reference import evictions_of, masked_continuation
from tests.helpers.reference import Reference
from tests.helpers.server_log import complaints
from tests.served.comparisons import LOGPROB_TOLERANCE
from tests.served.configurations import Configuration
from tests.served.mix import Case, Mix
from tests.served.pruned_mix import (
    LONG,
    LONG_BUDGET,
    Arm,
    PrunedRun,
    build_pruned_mix,
    long_case,
    same_evictions,
    serve_pruned_mix,
)
from vtoken_sglang.core.footprint import CHUNKS_IN_FLIGHT

pytestmark = [pytest.mark.server, pytest.mark.slow]

NAIVE = Arm(ablation="naive")
ASYNC = Arm()
SYNC = Arm(ablation="sync-copy")

# Page size with every other setting, and radix cache with chunked prefill, occur in every pairing.
# Sync copies run where async ones do, so that the two are compared; P=1 has nothing to copy.
BUSY = Configuration(16, radix=True, chunked=True, overlap=True)
PLAIN = Configuration(16, radix=False, chunked=False, overlap=False)
TOKENWISE = Configuration(1, radix=False, chunked=True, overlap=False)
TOKENWISE_BUSY = Configuration(1, radix=True, chunked=False, overlap=True)
RECLAIMED = [(BUSY, ASYNC), (BUSY, SYNC), (PLAIN, ASYNC), (TOKENWISE, ASYNC)]
ALL = [*RECLAIMED, (TOKENWISE_BUSY, ASYNC), (BUSY, NAIVE), (PLAIN, NAIVE), (TOKENWISE, NAIVE)]

# A request alone on the server meets the same batch sizes in every run, so its arithmetic is the
# same to the last bit. Requests sent together may be batched differently from run to run, and the
# projections of one request then round differently.
BATCHED_TOLERANCE = 1e-4

Serve = Callable[[Configuration, Arm], PrunedRun]


@pytest.fixture(scope="module")
def encode(reference: Reference) -> Callable[[str], list[int]]:
    return lambda text: list(reference.tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture(scope="module")
def pruned_mix(encode: Callable[[str], list[int]]) -> Mix:
    return build_pruned_mix(encode)


@pytest.fixture(scope="module")
def long(encode: Callable[[str], list[int]]) -> Case:
    return long_case(encode)


@pytest.fixture(scope="module")
def serve(
    model_path: Path, pruned_mix: Mix, long: Case, tmp_path_factory: pytest.TempPathFactory
) -> Serve:
    """What a server of this configuration and arm did with the mix; each is started once."""
    done: dict[tuple[Configuration, Arm], PrunedRun] = {}

    def run(configuration: Configuration, arm: Arm) -> PrunedRun:
        key = configuration, arm
        if key not in done:
            folder = tmp_path_factory.mktemp(f"{configuration}-{arm}")
            done[key] = serve_pruned_mix(configuration, arm, pruned_mix, long, model_path, folder)
        return done[key]

    return run


both_arms = pytest.mark.parametrize(("configuration", "arm"), RECLAIMED, ids=str)
every_run = pytest.mark.parametrize(("configuration", "arm"), ALL, ids=str)


@both_arms
def test_both_arms_eviction_the_same_tokens(
    serve: Serve, configuration: Configuration, arm: Arm
) -> None:
    masked, reclaimed = serve(configuration, NAIVE), serve(configuration, arm)
    assert same_evictions(masked.trace, reclaimed.trace) == []


@both_arms
def test_a_request_alone_answers_bit_for_bit_as_if_only_masked(
    serve: Serve, pruned_mix: Mix, configuration: Configuration, arm: Arm
) -> None:
    masked, reclaimed = serve(configuration, NAIVE), serve(configuration, arm)
    names = [*(case.name for case in pruned_mix.alone), LONG]
    assert len(names) == 9
    lines = [line for name in names for line in differences(name, masked, reclaimed, 0.0)]
    assert lines == []


@both_arms
def test_requests_together_answer_as_if_only_masked(
    serve: Serve, pruned_mix: Mix, configuration: Configuration, arm: Arm
) -> None:
    masked, reclaimed = serve(configuration, NAIVE), serve(configuration, arm)
    names = [case.name for case in pruned_mix.together]
    lines = [line for n in names for line in differences(n, masked, reclaimed, BATCHED_TOLERANCE)]
    assert lines == []


@every_run
def test_answers_equal_transformers_with_the_traced_pairs_masked(
    serve: Serve,
    pruned_mix: Mix,
    long: Case,
    reference: Reference,
    configuration: Configuration,
    arm: Arm,
) -> None:
    run = serve(configuration, arm)
    lines: list[str] = []
    for case in [*pruned_mix.cases(), long]:
        answer = run.answers[case.name]
        evictions = evictions_of(run.trace.get(case.name, []))
        best = masked_continuation(reference, case.prompt, answer.tokens, evictions)
        if answer.tokens != best.tokens or len(answer.tokens) != case.count:
            lines.append(f"{case.name}: {answer.tokens} != {best.tokens}, gaps {best.margins}")
            continue
        error = largest_gap(answer.logprobs, best.logprobs)
        if error > LOGPROB_TOLERANCE:
            lines.append(f"{case.name}: log-probabilities differ by up to {error:.2e}")
    assert lines == []


@every_run
def test_every_request_was_pruned_as_it_asked(
    serve: Serve, pruned_mix: Mix, configuration: Configuration, arm: Arm
) -> None:
    run = serve(configuration, arm)
    for case in pruned_mix.cases():
        options = case.sampling["custom_params"]["vtoken"]
        evictions = run.trace.get(case.name, [])
        if options["policy"] == "none":
            assert evictions == [], case.name
            continue
        assert run.evicted(case.name) > 0, case.name
        if options.get("shared") == "skip":
            protected = run.answers[case.name].cached
            lowest = min(min(e.evicted) for e in evictions)
            assert lowest >= protected > 0 or not configuration.radix, case.name
    masked = run.trace["shared prefix, masked"]
    if configuration.radix:
        assert min(masked[0].evicted) < run.answers["shared prefix, masked"].cached


@every_run
def test_memory_was_given_back_by_the_reclaiming_arm_only(
    serve: Serve, configuration: Configuration, arm: Arm
) -> None:
    state = serve(configuration, arm).state
    assert state["evicted_tokens"] > 800
    assert state["dropped_plans"] == 0
    assert (state["freed_pages"] > 0) == (arm != NAIVE)
    # A copy-on-write fork counts as a repack; at page size 1 nothing else ever moves.
    repacks = state["repacks"] - state["forks"]["committed"]
    assert (repacks > 0) == (arm != NAIVE and configuration.page_size > 1)
    assert (state["moved_tokens"] > 0) == (state["repacks"] > 0)
    assert state["freed_pages"] >= state["taken_pages"]


@every_run
def test_a_long_private_prompt_never_holds_its_full_length(
    serve: Serve, long: Case, configuration: Configuration, arm: Arm
) -> None:
    run = serve(configuration, arm)
    if arm == NAIVE or not configuration.chunked:
        assert run.long_peak > len(long.prompt)  # the measure can see a full prompt
        return
    assert run.trace[LONG][0].logical_len < len(long.prompt)
    # Twice the budget while a copy is under way, and the chunks that come until it takes effect and
    # may not be pruned yet: none of it grows with the prompt.
    chunk, interval = 64, 32
    assert run.long_peak <= 2 * LONG_BUDGET + CHUNKS_IN_FLIGHT * chunk + interval
    assert run.long_peak < 0.45 * (len(long.prompt) + long.count)


@every_run
def test_nothing_is_left_and_no_checker_complained(
    serve: Serve, configuration: Configuration, arm: Arm
) -> None:
    run = serve(configuration, arm)
    left = ("pruned_rows", "held_pages", "retained_pages", "live_private_tokens")
    assert {name: run.state[name] for name in left} == dict.fromkeys(left, 0)
    assert complaints(run.log) == []


def differences(name: str, left: PrunedRun, right: PrunedRun, tolerance: float) -> list[str]:
    """How the answers of two runs to one case differ, as lines."""
    a, b = left.answers[name], right.answers[name]
    if a.tokens != b.tokens:
        return [f"{name}: {b.tokens}, masked only: {a.tokens}"]
    error = largest_gap(a.logprobs, b.logprobs)
    if error > tolerance:
        return [f"{name}: log-probabilities differ by up to {error:.2e}"]
    return []


def largest_gap(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
