"""The reclaim figures: what is averaged, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from vtoken_sglang_eval.bench.reclaim_figures import (
    KEEPS,
    POLICIES,
    Held,
    core_bench_document,
    figures_of,
    held,
)
from vtoken_sglang_eval.bench.served_looks import EvictionPlan
from vtoken_sglang_eval.errors import FiguresError

BEFORE = EvictionPlan(pruned_rows=0, retained=0, held=0, live=0, repacks=3, evicted=100)


def look(
    retained: int, live: int, *, dst: int = 0, repacks: int = 3, evicted: int = 160
) -> EvictionPlan:
    return EvictionPlan(
        pruned_rows=1, retained=retained, held=dst, live=live, repacks=repacks, evicted=evicted
    )


def test_looks_are_averaged_over_the_pruned_part_of_a_request() -> None:
    seen = [BEFORE, BEFORE, look(10, 80, dst=5), look(5, 75, repacks=4), look(6, 84, repacks=4)]
    after_it = replace(BEFORE, repacks=4, evicted=160)
    got = held([[*seen, after_it]], 16, [[1, 2]])
    assert got.retained == pytest.approx((15 + 5 + 6) / 3)
    assert got.waste == pytest.approx((0.5 + 1 - 75 / 80 + 1 - 84 / 96) / 3)
    assert got.waste_after == pytest.approx(1 - 75 / 80)  # the one look after the commit
    assert got.limit_gap == pytest.approx(0.0)  # five pages are the fewest for 75 tokens
    assert (got.evicted, got.answers) == (60, [[1, 2]])


def test_without_a_repack_every_look_counts() -> None:
    got = held([[BEFORE, look(6, 80), look(6, 88)]], 16, [[]])
    assert got.waste_after == pytest.approx(got.waste)
    assert got.limit_gap == pytest.approx((6 / 5 - 1 + 0) / 2)


def test_a_commit_before_the_first_look_counts_and_one_of_an_earlier_request_does_not() -> None:
    looks = [look(8, 80, repacks=9), look(8, 64, repacks=9)]
    own = held([[BEFORE, *looks]], 16, [[]])
    assert own.waste_after == pytest.approx(1 - 80 / 128)
    earlier = held([[replace(BEFORE, repacks=9), *looks]], 16, [[]])
    assert earlier.waste_after == pytest.approx(earlier.waste)


def test_a_request_never_seen_pruned_is_refused() -> None:
    with pytest.raises(FiguresError, match="before it was seen"):
        held([[BEFORE, BEFORE]], 16, [[]])


def arm(retained: float, evicted: int = 9, answer: int = 1) -> dict[tuple[str, int, int], Held]:
    one = Held(
        retained=retained,
        waste=0.5,
        waste_after=0.04,
        limit_gap=0.1,
        evicted=evicted,
        answers=[[answer]],
    )
    return {(policy, keep, r): one for policy in POLICIES for keep in KEEPS for r in range(2)}


def test_figures_of_one_page_size() -> None:
    found = figures_of(16, arm(40.0), arm(10.0), 2)
    assert found["retained_ratio_random_keep30_p16"]["value"] == 0.25
    assert found["f_after_streaming_llm_keep70_p16"]["value"] == 0.04
    assert found["limit_gap_random_keep50_p16"]["value"] == 0.1
    assert found["answer_mismatches_p16"]["value"] == 0
    assert len(found) == 5 * len(POLICIES) * len(KEEPS) + 1


def test_answers_that_differ_are_counted() -> None:
    found = figures_of(16, arm(40.0), arm(10.0, answer=2), 2)
    assert found["answer_mismatches_p16"]["value"] == 2 * len(POLICIES) * len(KEEPS)


@pytest.mark.parametrize(("naive", "ours"), [(9, 8), (0, 0)])
def test_arms_that_evicted_differently_or_nothing_are_refused(naive: int, ours: int) -> None:
    with pytest.raises(FiguresError, match="did not eviction the same tokens"):
        figures_of(16, arm(40.0, naive), arm(10.0, ours), 2)


def test_figures_of_the_core_bench_keep_their_provenance(tmp_path: Path) -> None:
    path = tmp_path / "core_bench.json"
    entry = {"value": 0.01, "unit": "share", "spread": {}}
    document = {"topic": "core_bench", "command": "python -m bench", "repeats": 3}
    names = ["copy_ratio", "planner_ms_quiet_requests8_pages1000", "planner_step_share"]
    simulated = {"sim_f_random_keep30_p16": entry}
    path.write_text(json.dumps({**document, "figures": dict.fromkeys(names, entry) | simulated}))
    got = core_bench_document(path)
    assert (got["topic"], got["command"]) == ("core", "python -m bench")
    assert sorted(got["figures"]) == names
    path.write_text(json.dumps({**document, "figures": {"copy_ratio": entry}}))
    with pytest.raises(FiguresError, match="planner_step_share"):
        core_bench_document(path)
    with pytest.raises(FiguresError, match="no such file"):
        core_bench_document(tmp_path / "absent.json")
