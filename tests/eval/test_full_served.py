"""Every workload on a real engine, arms that share a server, SGLang's own client: a small grid."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.cells import CellStore
from vtoken_sglang_eval.main import main
from vtoken_sglang_eval.sources import SAMPLES
from vtoken_sglang_eval.workload import workload_builders

pytestmark = [pytest.mark.server, pytest.mark.slow]

GRID = """
repeats = 1
pool = 1536
concurrency = 4
conversations = 4
turns = 1
sharing = 2
system_tokens = 192
user_tokens = 32
out_tokens = 24
device = "cpu"
server_args = ["--decode-log-interval", "2", "--vtoken-check"]
sample_interval = 0.1
arms = ["naive", "mask", "auto"]
"""


@pytest.fixture
def one_server_at_a_time() -> Iterator[None]:
    """The lock that every test with servers takes."""
    default = Path(tempfile.gettempdir()) / "vtoken_sglang-tests.lock"
    with Path(os.environ.get("VTOKEN_TEST_SERVER_LOCK") or default).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("one_server_at_a_time")
def test_every_workload_is_served_and_memory_comes_back(tmp_path: Path) -> None:
    text = GRID
    for workload in workload_builders():
        text += f'[[grid]]\nworkload = "{workload}"\n'
        if workload == "mooncake":
            text += f'dataset = "{SAMPLES / "trace.jsonl"}"\nlength_scale = 0.2\n'
        if workload == "multi_turn":
            text += f'turns = 2\ndataset = "{SAMPLES / "conversations.json"}"\n'
        if workload == "document_questions":
            text += f'dataset = "{SAMPLES / "documents.jsonl"}"\n'
    (tmp_path / "small.toml").write_text(text)
    out = tmp_path / "out"
    assert main(["full", "--config", str(tmp_path / "small.toml"), "--out", str(out)]) == 0
    results = {result["workload"]["name"]: result for result in CellStore(out).results()}
    assert set(results) == set(workload_builders())
    for name, result in results.items():
        summaries = {run["arm"]: run["summary"] for run in result["runs"]}
        assert all(not summary["failed"] for summary in summaries.values())
        evicted = {arm: summary["evicted_tokens"] for arm, summary in summaries.items()}
        assert evicted["naive"] == evicted["mask"] == evicted["auto"], name
        assert summaries["naive"]["freed_pages"] == 0
        if name != "generated_shared_prefix":  # its client reports no ids
            assert all(not entry["mismatched"] for entry in result["tokens"]["arms"]), name
    freed = {name: run_of_arm(result, "auto")["freed_pages"] for name, result in results.items()}
    assert freed["reasoning"] > 0
    forks = sum(run_of_arm(result, "auto")["forks"] for result in results.values())
    assert forks > 0
    questions = run_of_arm(results["document_questions"], "naive")
    assert questions["scored_answers"] == 4
    assert (out / "report.html").read_text().count("<section>") == 1 + len(results)


def run_of_arm(result: dict[str, Any], arm: str) -> dict[str, Any]:
    """The summary of the arm's only run."""
    (run,) = (run for run in result["runs"] if run["arm"] == arm)
    summary: dict[str, Any] = run["summary"]
    return summary
