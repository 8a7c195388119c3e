"""`eval compare` on real engines: what the arms evict, free and answer; a server that runs."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.main import main
from vtoken_sglang_eval.server import HOST, ServerProcess, free_port
from vtoken_sglang_eval.store import read_runs
from vtoken_sglang_eval.targets import RunningServer

from tests.helpers.tiny_model import save_tiny_model

pytestmark = pytest.mark.server
SMALL = ["--repeats", "1", "--sample-interval", "0.1", "--conversations", "4"]
ARMS = ["--policies", "random", "--keep", "0.3", "--shared", "mask,auto"]


@pytest.fixture(autouse=True)
def _one_server_at_a_time() -> Iterator[None]:
    """The lock that every test with servers takes."""
    default = Path(tempfile.gettempdir()) / "vtoken_sglang-tests.lock"
    with Path(os.environ.get("VTOKEN_TEST_SERVER_LOCK") or default).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny"), model_path))


def runs_of(out: Path) -> dict[str, dict[str, Any]]:
    """The only run of each arm."""
    return {run["arm"]: run for run in read_runs(out)[1]}


def test_arms_evict_alike_and_only_reclaiming_ones_give_memory_back(
    tmp_path: Path, model: str
) -> None:
    out = tmp_path / "out"
    words = [
        "--workload",
        "reasoning",
        "--sharing",
        "2",
        "--system-tokens",
        "192",
        "--pool",
        "1536",
    ]
    words += ["--out-tokens", "48", "--ablations", "naive", "--server-args=--vtoken-check"]
    assert main(["compare", "--model", model, *SMALL, *ARMS, *words, "--out", str(out)]) == 0
    runs = runs_of(out)
    assert set(runs) == {
        "native", "random 0.3 mask", "random 0.3 auto", "random 0.3 mask naive"
    }  # fmt: skip
    pruned = [run for arm, run in runs.items() if arm != "native"]
    assert runs["native"]["evicted_tokens"] == 0
    assert len({run["evicted_tokens"] for run in pruned}) == 1
    assert pruned[0]["evicted_tokens"] > 0
    assert len({run["output_sha256"] for run in pruned}) == 1
    assert runs["random 0.3 mask naive"]["freed_pages"] == 0
    assert runs["random 0.3 auto"]["freed_pages"] > 0
    assert runs["random 0.3 auto"]["forks"] > 0


def test_a_running_server_is_asked_for_its_facts_and_replays_data(
    tmp_path: Path, model: str
) -> None:
    port, out = free_port(), tmp_path / "out"
    command = [sys.executable, "-m", "vtoken_sglang.cli", "serve", "--model-path", model]
    command += ["--host", HOST, "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    command += ["--sleep-on-idle", "--page-size", "16", "--max-total-tokens", "3072"]
    command += ["--vtoken-policy", "random", "--vtoken-keep", "1.0"]
    environment = {"OMP_NUM_THREADS": "1"}
    with ServerProcess(command, port, tmp_path / "server.log", environment) as server:
        facts = RunningServer(server.base_url).facts
        assert (facts.model, facts.page_size, facts.pool) == (model, 16, 3072)
        assert facts.limit == 3072
        assert facts.prunes
        assert any("--enable-metrics" in text for text in facts.missing)
        words = ["--url", server.base_url, "--dataset", "sample:documents.jsonl"]
        words += ["--quality", "--quality-tokens", "128"]
        assert main(["compare", *SMALL, *ARMS, *words, "--out", str(out)]) == 0
    runs = runs_of(out)
    assert set(runs) == {"native", "random 0.3 mask", "random 0.3 auto"}
    for run in runs.values():
        assert run["failed"] == 0
        assert run["recall_questions"] == 4
        assert run["questions"] == 9
        assert "held_per_request" not in run
    assert runs["random 0.3 mask"]["evicted_tokens"] > 0
