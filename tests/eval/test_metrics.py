"""Figures against values worked out by hand."""

from __future__ import annotations

import pytest
from vtoken_sglang_eval.client import RunTrace, StreamTimer, hash_ids, parse_event
from vtoken_sglang_eval.metrics import (
    contains,
    distribution,
    goodput,
    output_hash,
    pool_use,
    recall,
    summarize,
)
from vtoken_sglang_eval.results import spread
from vtoken_sglang_eval.sampling import (
    PoolSample,
    PrunedSample,
    Sampler,
    added,
    counters_of,
    parse_gauges,
    private_memory,
)
from vtoken_sglang_eval.workloads.base import Session, Workload

from tests.eval.builders import CharacterTokenizer, record


def test_distribution_interpolates_between_samples() -> None:
    found = distribution("x", [4.0, 1.0, 3.0, 2.0, 5.0])
    # 0.95 of the way through 4 steps is 3.8 steps
    assert found == pytest.approx({"x_mean": 3.0, "x_p50": 3.0, "x_p95": 4.8, "x_p99": 4.96})
    assert distribution("x", []) == {}


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0, 4.0]) == pytest.approx(
        {"median": 2.5, "min": 1.0, "max": 4.0, "q1": 1.75, "q3": 3.25}
    )
    with pytest.raises(ValueError, match="at least one"):
        spread([])


def test_summary_of_a_run() -> None:
    records = (
        record(0, 0),
        record(0, 1, ttft_s=0.4, latency_s=2.0, gaps_s=(0.4,) * 4, cached_tokens=80),
        record(1, 0, error="HTTP 500", output_ids=()),
    )
    pool = (PoolSample(at_s=0, used=10, running=1), PoolSample(at_s=1, used=30, queued=2))
    trace = RunTrace(records=records, pool=pool, duration_s=4.0)
    found = summarize(trace, 3.0)
    assert (found["requests"], found["failed"]) == (2, 1)
    assert found["requests_per_s"] == pytest.approx(0.5)
    assert found["tokens_per_s"] == pytest.approx(10 / 4)
    assert found["cached_share"] == pytest.approx(140 / 200)
    assert found["computed_tokens"] == 60
    assert found["ttft_p50"] == pytest.approx(0.3)
    assert found["e2e_mean"] == pytest.approx(1.5)
    assert found["itl_p50"] == pytest.approx(0.3)
    assert found["held_tokens"] == pytest.approx(10)  # while a request runs
    assert found["cpu_ms_per_token"] == pytest.approx(300.0)


def test_what_was_not_read_is_not_in_the_summary() -> None:
    found = summarize(RunTrace(records=(record(),), pool=(), duration_s=1.0), None)
    assert not {"held_tokens", "held_per_request", "cpu_ms_per_token", "goodput"} & set(found)


def test_the_output_hash_depends_on_every_token_and_its_place() -> None:
    base = output_hash([record(0, 0), record(0, 1)])
    assert base == output_hash([record(0, 0, ttft_s=9.0), record(0, 1)])
    assert base != output_hash([record(0, 0, output_ids=(1, 2, 3, 4, 6)), record(0, 1)])
    assert base != output_hash([record(0, 1), record(0, 0)])


def test_stream_timer_shares_a_gap_between_the_tokens_of_a_chunk() -> None:
    timer = StreamTimer(sent=10.0)
    timer.chunk(10.5, 1)
    timer.chunk(10.7, 2)
    timer.chunk(10.8, 2)  # a chunk without a new token is no event
    timer.chunk(11.3, 5)
    assert timer.ttft_s == pytest.approx(0.5)
    assert timer.gaps_s == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert timer.latency_s == pytest.approx(1.3)


def test_stream_timer_with_several_tokens_in_the_first_chunk() -> None:
    timer = StreamTimer(sent=0.0)
    timer.chunk(1.0, 3)
    assert timer.ttft_s == pytest.approx(1.0)
    assert timer.gaps_s == [0.0, 0.0]


def test_event_lines() -> None:
    assert parse_event(b'data: {"output_ids": [1]}\n') == {"output_ids": [1]}
    assert parse_event(b"data: [DONE]\n") is None
    assert parse_event(b"\n") is None
    assert hash_ids([1, 2]) != hash_ids([12])


PAGE = """\
# HELP sglang:kv_used_tokens Tokens in use.
# TYPE sglang:kv_used_tokens gauge
sglang:kv_used_tokens{model_name="a b",tp_rank="0"} 32.0
sglang:kv_available_tokens{tp_rank="0"} 8160.0
sglang:num_queue_reqs{tp_rank="0"} 3.0
sglang:num_queue_reqs{tp_rank="0",priority="1"} 2.0
sglang:num_retracted_requests_total 4.0
sglang:other 5
"""


def test_gauges_are_found_on_a_prometheus_page() -> None:
    assert parse_gauges(PAGE) == {
        "used": 32.0,
        "available": 8160.0,
        "queued": 3.0,
        "retracted": 4.0,
    }


def test_samples_count_from_the_first_change_on() -> None:
    sampler = Sampler(None, 0.0, 1.0)  # type: ignore[arg-type]
    for at_s, used in enumerate((5.0, 5.0, 7.0, 7.0, 5.0)):
        sampler.add_gauges(float(at_s), {"used": used})
    assert [(sample.at_s, sample.used) for sample in sampler.pool] == [
        (2.0, 7.0),
        (3.0, 7.0),
        (4.0, 5.0),
    ]


def test_a_server_without_metrics_gives_no_sample() -> None:
    sampler = Sampler(None, 0.0, 1.0)  # type: ignore[arg-type]
    sampler.add_gauges(0.0, {})
    sampler.add_gauges(1.0, {})
    assert sampler.pool == []


@pytest.mark.parametrize(
    ("answer", "expected", "found"),
    [
        ("The code is 48213.", "48213", True),
        ("The code is 148213.", "48213", False),
        ("It is PARIS, of course", "Paris", True),
        ("Parisian", "Paris", False),
        ("anything", "  ", False),
    ],
)
def test_an_expected_text_stands_as_a_word_of_its_own(
    answer: str, expected: str, found: bool
) -> None:
    assert contains(answer, expected) is found


def test_recall_counts_scored_answers_only() -> None:
    session = Session(
        session=0, first_prompt=(1,), later_turns=((2,), (3,)), answer_tokens=(2, 2, 2),
        expected=(("ab",), (), ("zz", "cd")),
    )  # fmt: skip
    ids = tuple(map(ord, "cd"))
    records = [record(0, turn, output_ids=ids) for turn in range(3)]
    found = recall(Workload(name="x", sessions=(session,)), records, CharacterTokenizer())
    assert found == [False, True]
    plain = Session(session=0, first_prompt=(1,), answer_tokens=(2,))
    assert recall(Workload(name="x", sessions=(plain,)), records[:1], CharacterTokenizer()) == []


def test_pool_use_looks_at_samples_with_running_requests() -> None:
    samples = [
        PoolSample(at_s=0, used=10, running=0),
        PoolSample(at_s=1, used=100, evictable=40, running=1, queued=2),
        PoolSample(at_s=2, used=200, running=2),
    ]
    assert pool_use(samples) == {
        "held_per_request": 100.0, "held_tokens": 150.0, "peak_held_tokens": 200,
        "cached_tokens_idle": 20.0, "running": 1.5, "peak_running": 2, "queued": 1.0,
    }  # fmt: skip
    assert pool_use(samples[:1]) == {}


def test_goodput_counts_requests_within_both_limits() -> None:
    records = [
        record(0, 0, ttft_s=0.4, latency_s=2.0),  # 0.4 s per further token
        record(0, 1, ttft_s=0.5, latency_s=1.0),
        record(1, 0, ttft_s=0.2, latency_s=2.0),
    ]
    assert goodput(records, 0.4, 0.41) == 1
    assert goodput(records, 0.4, 0.0) == 2
    assert goodput(records, 0.0, 0.41) == 2


def test_private_memory_is_over_looks_at_pruned_requests() -> None:
    looks = [
        PrunedSample(at_s=0.0),
        PrunedSample(at_s=0.1, pruned_rows=1, retained_pages=10, live_private_tokens=80),
        PrunedSample(
            at_s=0.2, pruned_rows=2, retained_pages=6, held_pages=2, live_private_tokens=48
        ),
    ]
    found = private_memory(looks, 16)
    assert found["private_pages"] == pytest.approx(18 / 3)
    assert found["waste_f"] == found["waste_f_after"] == pytest.approx(0.5)
    assert found["limit_gap"] == pytest.approx(1.0)  # 16 pages, 8 would do
    assert private_memory(looks[:1], 16) == {}
    repacked = PrunedSample(
        at_s=0.3, pruned_rows=1, retained_pages=5, live_private_tokens=60, repacks=1
    )
    found = private_memory([*looks, repacked], 16)
    assert found["waste_f_after"] == pytest.approx(1 - 60 / 80)
    assert found["limit_gap"] == pytest.approx(1 / 4)


def test_counters_are_what_a_run_added() -> None:
    before = {"evicted_tokens": 5, "moved_tokens": 1, "forks": {"committed": 1}}
    after = {"evicted_tokens": 12, "moved_tokens": 1, "forks": {"committed": 3}}
    found = added(before, after)
    assert (found["evicted_tokens"], found["moved_tokens"], found["forks"]) == (7, 0, 2)
    assert added(None, after) == {}
    assert counters_of({"internal_states": [{"vtoken": {"hook": 1}}]}) is None
    assert counters_of({}) is None
    assert counters_of({"internal_states": [{"vtoken": before}]}) == before
