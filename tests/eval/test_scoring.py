"""Quality, goodput and this package's counters, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from vtoken_sglang_eval.across_arms import with_shared_figures
from vtoken_sglang_eval.counters import EvictionPlan, block_of, private_memory, totals
from vtoken_sglang_eval.generated_shared_prefix import client_command, parse_output
from vtoken_sglang_eval.metrics import pool_use, tpot
from vtoken_sglang_eval.pool import PoolSample
from vtoken_sglang_eval.scoring import agreement, contains, recall
from vtoken_sglang_eval.workload import BenchPlan, Session, Workload

from tests.eval.builders import CharacterTokenizer, record, run_of

PLAN = BenchPlan(
    groups=2, prompts_per_group=3, prefix_tokens=64, question_tokens=8, answer_tokens=3,
    concurrency=2, seed=0, model="tiny",
)  # fmt: skip


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
        session=0, lane=0, first_prompt=(1,), later_turns=((2,), (3,)), answer_tokens=(2, 2, 2),
        expected=(("ab",), (), ("zz", "cd")),
    )  # fmt: skip
    ids = tuple(map(ord, "cd"))
    records = [record(0, turn, output_ids=ids) for turn in range(3)]
    found = recall(Workload(name="x", sessions=(session,)), records, CharacterTokenizer())
    assert found == {"recall": 0.5, "scored_answers": 2}
    plain = Session(session=0, lane=0, first_prompt=(1,), later_turns=(), answer_tokens=(2,))
    assert recall(Workload(name="x", sessions=(plain,)), records[:1], CharacterTokenizer()) == {}


def test_agreement_is_over_equal_prompts() -> None:
    base = run_of("native", 0, [record(0, 0), record(0, 1), record(1, 0)])
    ours = run_of(
        "auto",
        0,
        [
            record(0, 0, output_ids=(1, 2, 9, 4, 5)),
            record(0, 1, prompt_hash="another"),
            record(1, 0),
        ],
    )
    assert agreement(ours, base) == pytest.approx((2 / 5 + 1) / 2)
    assert agreement(run_of("auto", 0, [record(prompt_hash="x")]), base) is None


def test_goodput_uses_twice_the_unpruned_medians_of_the_same_repeat() -> None:
    # native: first token after 0.2 s, 0.2 s per further token
    runs = [
        run_of("native", 0, [record(0, 0), record(0, 1)]),
        run_of(
            "auto",
            0,
            [
                record(0, 0, ttft_s=0.4, latency_s=2.0),  # 0.4 s a token: both just within
                record(0, 1, ttft_s=0.41, latency_s=1.0),
                record(1, 0, ttft_s=0.2, latency_s=1.81),
            ],
        ),
        run_of("auto", 1, [record()]),
    ]
    native, auto, alone = (run["summary"] for run in with_shared_figures(runs, {}))
    assert native["goodput"] == pytest.approx(1.0)
    assert auto["goodput"] == pytest.approx(0.5)
    assert auto["good_share"] == pytest.approx(1 / 3)
    assert auto["slo_ttft_s"] == pytest.approx(0.4)
    assert "agreement" in auto
    assert "goodput" not in alone
    fixed = with_shared_figures(runs, {"slo_ttft": 9.0, "slo_tpot": 9.0})[1]["summary"]
    assert fixed["good_share"] == 1.0
    assert "goodput" not in runs[1]["summary"]  # the runs given are left as they were


def test_pool_use_looks_at_samples_with_running_requests() -> None:
    samples = [
        PoolSample(at_s=0, used=10, running=0),
        PoolSample(at_s=1, used=100, running=1, queued=2),
        PoolSample(at_s=2, used=200, running=2),
    ]
    assert pool_use(samples) == {
        "used_tokens_per_request": 100.0, "mean_running": 1.5, "mean_queued": 1.0
    }  # fmt: skip
    assert pool_use(samples[:1]) == {}
    assert tpot(record(latency_s=1.0, ttft_s=0.2)) == pytest.approx(0.2)


def test_private_memory_is_over_looks_at_pruned_requests() -> None:
    looks = [
        EvictionPlan(at_s=0.0),
        EvictionPlan(at_s=0.1, pruned_rows=1, retained_pages=10, live_private_tokens=80),
        EvictionPlan(
            at_s=0.2, pruned_rows=2, retained_pages=6, held_pages=2, live_private_tokens=48
        ),
    ]
    found = private_memory(looks, 16)
    assert found["private_pages_per_request"] == pytest.approx(18 / 3)
    assert found["utilisation"] == pytest.approx(0.5)
    assert found["waste_f"] == pytest.approx(0.5)
    assert private_memory(looks[:1], 16) == {}


def state(evicted: int, forks: list[tuple[float, int | None]]) -> dict[str, Any]:
    log = [{"predicted_pages": p, "realised_pages": r} for p, r in forks]
    committed = sum(r is not None for _, r in forks)
    return {"evicted_tokens": evicted, "forks": {"committed": committed, "log": log}}


def test_totals_are_what_a_run_added() -> None:
    before = state(5, [(9.0, 9)])
    after = state(12, [(9.0, 9), (4.0, 3), (7.0, None), (2.0, 2)])
    added = totals(before, after)
    assert added["evicted_tokens"] == 7
    assert (added["forks"], added["forks_logged"]) == (2, 2)
    assert (added["fork_predicted_pages"], added["fork_realised_pages"]) == (6.0, 5)
    assert totals(None, after) == {}
    assert block_of({"internal_states": [{"vtoken": {"hook": 1}}]}) is None
    assert block_of({}) is None
    assert block_of({"internal_states": [{"vtoken": before}]}) == before


def test_the_benchmark_client_is_asked_for_what_the_plan_says(tmp_path: Any) -> None:
    words = client_command(PLAN, "http://h:1", {"keep": 0.3}, tmp_path / "out")
    assert words[words.index("--gsp-num-groups") + 1] == "2"
    assert words[words.index("--gsp-output-len") + 1] == "3"
    extra = words[words.index("--extra-request-body") + 1]
    assert '"custom_params": {"vtoken": {"keep": 0.3}}' in extra
    assert '"max_new_tokens": 3' in extra
    assert "--extra-request-body" not in client_command(PLAN, "http://h:1", {}, tmp_path / "out")


def test_output_of_the_benchmark_client_becomes_records() -> None:
    result = {
        "duration": 2.5,
        "input_lens": [72, 72, 72],
        "output_lens": [3, 2, 0],
        "ttfts": [0.5, 0.25, 0.0],
        "itls": [[0.1, 0.1], [0.2], []],
        "errors": ["", "", "no thanks"],
        "cached_tokens": [0, 64, 0],
    }
    records, duration_s = parse_output(result, PLAN)
    assert duration_s == 2.5
    assert records[0].latency_s == pytest.approx(0.7)
    assert records[0].tokens == 3
    assert records[1].cached_tokens == 64
    assert [bool(entry.error) for entry in records] == [False, True, True]
    assert "2 tokens came back, 3 were asked for" in records[1].error
