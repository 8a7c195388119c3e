"""Figures against values worked out by hand."""

from __future__ import annotations

import pytest
from vtoken_sglang_eval.client import RunTrace, StreamTimer, hash_ids, parse_event
from vtoken_sglang_eval.metrics import distribution, figure_at, output_hash, spread, summarize
from vtoken_sglang_eval.pool import PoolSample, PoolSampler, parse_gauges

from tests.eval.builders import record


def test_distribution_interpolates_between_samples() -> None:
    found = distribution([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found["mean"] == pytest.approx(3.0)
    assert found["p50"] == pytest.approx(3.0)
    assert found["p95"] == pytest.approx(4.8)  # 0.95 of the way through 4 steps is 3.8 steps
    assert found["p99"] == pytest.approx(4.96)
    assert found["count"] == 5
    assert distribution([]) == {"count": 0}


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
    summary = summarize(RunTrace(records=records, pool=pool, duration_s=4.0), server_cpu_s=3.0)
    assert (summary["requests"], summary["failed"]) == (2, 1)
    assert summary["request_throughput"] == pytest.approx(0.5)
    assert summary["output_tokens_per_s"] == pytest.approx(10 / 4)
    assert summary["cached_share"] == pytest.approx(140 / 200)
    assert figure_at(summary, "ttft.p50") == pytest.approx(0.3)
    assert figure_at(summary, "e2e.mean") == pytest.approx(1.5)
    assert summary["itl"]["count"] == 8
    assert figure_at(summary, "itl.p50") == pytest.approx(0.3)
    assert summary["peak_used_tokens"] == 30
    assert summary["mean_used_tokens"] == pytest.approx(20)
    assert summary["server_cpu_ms_per_token"] == pytest.approx(300.0)


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
    sampler = PoolSampler(None, 0.0, 1.0)  # type: ignore[arg-type]
    for at_s, used in enumerate((5.0, 5.0, 7.0, 7.0, 5.0)):
        sampler.add(float(at_s), {"used": used})
    assert [(sample.at_s, sample.used) for sample in sampler.samples] == [
        (2.0, 7.0),
        (3.0, 7.0),
        (4.0, 5.0),
    ]
