"""The benchmark runs and says what it must; no time is judged here."""

import json
from pathlib import Path

from vtoken_sglang_eval.bench import core_bench


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
