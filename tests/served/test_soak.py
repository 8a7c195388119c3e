"""Hundreds of requests that end in every way, over a pool too small for them: nothing leaks."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import PRODUCT, ServerProcess
from tests.helpers.server_log import complaints
from tests.helpers.soak import Soak, soak_requests
from tests.helpers.tiny_model import save_tiny_model
from tests.served.configurations import STRICT_CHECKS

pytestmark = pytest.mark.server

REQUESTS = 320
POOL = 1536  # tokens; twelve running requests want up to 6000
PAUSES = 4
FLAGS = (
    *("--page-size", "16", "--chunked-prefill-size", "64", "--enable-metrics"),
    *("--max-total-tokens", str(POOL), "--max-running-requests", "12"),
    *("--schedule-conservativeness", "0.3"),
    *("--vtoken-policy", "random", "--vtoken-keep", "0.5", "--vtoken-recent", "8"),
    "--vtoken-check",
)
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "29"}
PROBE = {
    "input_ids": list(range(900, 1100)),
    "sampling_params": {
        "temperature": 0,
        "max_new_tokens": 60,
        "ignore_eos": True,
        "custom_params": {"vtoken": {"publish": "never", "keep": 0.4}},
    },
    "return_logprob": True,
}


@dataclass(frozen=True, slots=True)
class Soaked:
    """What was seen: how requests ended, states during and after, the probe before and after."""

    outcomes: Counter[str]
    problems: list[str]
    probes: tuple[Any, Any]
    after: dict[str, Any]
    metrics: str
    flush_status: int
    alive: bool
    log: str


@pytest.fixture(scope="module")
def soaked(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soaked]:
    folder = tmp_path_factory.mktemp("soak")
    model = save_tiny_model(folder / "model", model_path)
    flags = ["--model-path", str(model), *FLAGS]
    log = folder / "server.log"
    environment = {**STRICT_CHECKS, **RETRACT}
    with ServerProcess(flags, log=log, entry=PRODUCT, environment=environment) as server:
        before = server.generate(PROBE)
        soak = Soak(server, workers=24)
        with soak.start(soak_requests(REQUESTS, seed=5)):
            interrupt(server, soak)
        flush = server.post("/flush_cache?timeout=30", None).status_code
        after = server.generate(PROBE)
        (state,) = server.get("/server_info").json()["internal_states"]
        metrics = server.get("/metrics").text
        time.sleep(1.0)  # a few rounds of the idle check
        yield Soaked(
            soak.outcomes,
            soak.problems,
            (before, after),
            state["vtoken"],
            metrics,
            flush,
            server.exit_status is None,
            server.log,
        )


def interrupt(server: ServerProcess, soak: Soak) -> None:
    """Pause and go on, several times while the requests run: with every request where it is on odd
    rounds, with all of them taken back on even ones."""
    for at in range(1, PAUSES + 1):
        while soak.ended < REQUESTS * at // (PAUSES + 1):
            assert server.exit_status is None, server.log[-3000:]
            time.sleep(0.1)
        mode = "in_place" if at % 2 else "retract"
        assert server.post("/pause_generation", {"mode": mode}).status_code == 200
        time.sleep(0.3)
        # Taken back, every row is in the pool by now and the cache may be dropped; else SGLang
        # refuses while requests hold rows, and the copies in flight were settled all the same.
        expected = (200, 400) if mode == "in_place" else (200,)
        assert server.post("/flush_cache", None).status_code in expected
        assert server.post("/continue_generation", {}).status_code == 200


def test_every_request_was_answered(soaked: Soaked) -> None:
    assert soaked.problems == []
    assert soaked.outcomes.total() == REQUESTS


def test_requests_ended_in_every_way(soaked: Soaked) -> None:
    least = {"length": 60, "stop": 15, "abort": 10, "hung up": 15}
    assert {
        kind: soaked.outcomes[kind] for kind in least if soaked.outcomes[kind] < least[kind]
    } == {}


def test_the_pool_was_short_and_requests_were_retracted(soaked: Soaked) -> None:
    assert len(re.findall(r"Testing retraction\.", soaked.log)) >= 5
    assert gauge(soaked.metrics, "sglang:evicted_tokens_total") > 0
    assert gauge(soaked.metrics, "sglang:num_retracted_requests_total") >= 5


def test_pruning_and_repacking_went_on(soaked: Soaked) -> None:
    assert soaked.after["pruned_requests"] > REQUESTS // 4
    assert soaked.after["repacks"] > 50
    assert soaked.after["freed_pages"] > 200
    assert soaked.after["forks"]["committed"] > 0


def test_nothing_is_held_afterwards(soaked: Soaked) -> None:
    left = ("pruned_rows", "held_pages", "retained_pages", "live_private_tokens")
    assert {name: soaked.after[name] for name in left} == dict.fromkeys(left, 0)
    assert soaked.flush_status == 200


def test_no_checker_complained(soaked: Soaked) -> None:
    assert complaints(soaked.log) == []
    assert soaked.alive


def test_the_server_answers_as_before(soaked: Soaked) -> None:
    before, after = soaked.probes
    assert after["output_ids"] == before["output_ids"]
    pairs = zip(
        before["meta_info"]["output_token_logprobs"],
        after["meta_info"]["output_token_logprobs"],
        strict=True,
    )
    assert max(abs(a[0] - b[0]) for a, b in pairs) == 0.0


def gauge(page: str, name: str) -> float:
    """Sum of a metric over its label sets; 0.0 when it is not on the page."""
    found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))
