"""The benchmark and the simulation run and say what they must; no time is judged here."""

import json
from pathlib import Path

import pytest
from vtoken_sglang_eval.bench import core_bench, core_simulation


def test_quick_benchmark_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "core_bench.json"
    words = ["--quick", "--repeats", "1", "--parts", "planner", "copy", "--out", str(out)]
    assert core_bench.main(words) == 0
    document = json.loads(out.read_text())
    assert document["topic"] == "core_bench"
    assert document["settings"]["quick"] is True
    assert {"planner_step_share", "copy_ratio", "planner_ms_busy_requests8_pages1000"} <= set(
        document["figures"]
    )
    assert all(figure["value"] > 0 for figure in document["figures"].values())


@pytest.mark.parametrize("policy", core_simulation.POLICIES)
def test_reclaim_holds_fewer_pages_for_the_same_evictions(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_simulation, "PROMPT", 300)
    monkeypatch.setattr(core_simulation, "OUTPUT", 120)
    naive, ours = (
        core_simulation.simulate(policy, keep=0.3, page_size=16, reclaim=reclaim, count=2, seed=5)
        for reclaim in (False, True)
    )
    assert naive.waste > 0.6
    assert ours.retained < 0.5 * naive.retained
    assert ours.waste < 0.3
    assert 0 <= ours.limit_gap < 0.3
