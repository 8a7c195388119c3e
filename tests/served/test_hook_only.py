"""Plugin on, nothing evicted: every row is read through the slot map, every answer is unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.reference import Reference
from tests.helpers.server import ServerProcess
from tests.helpers.server_log import complaints
from tests.served.comparisons import against_answers, against_transformers
from tests.served.configurations import CONFIGURATIONS, POOL_FLAGS, STRICT_CHECKS, Configuration
from tests.served.mix import Answer, Mix, run_mix
from vtoken_sglang import __version__

pytestmark = pytest.mark.server


@dataclass(frozen=True, slots=True)
class Served:
    """One hook-only server after the mix: answers over a cold and, where there is one, a warm
    cache, /server_info, its log."""

    configuration: Configuration
    cold: dict[str, Answer]
    warm: dict[str, Answer]
    info: dict[str, Any]
    log: str


PARAMS = [pytest.param(c, marks=[pytest.mark.slow] * c.slow, id=str(c)) for c in CONFIGURATIONS]


@pytest.fixture(scope="module", params=PARAMS)
def served(
    request: pytest.FixtureRequest,
    model_path: Path,
    mix: Mix,
    tmp_path_factory: pytest.TempPathFactory,
) -> Served:
    configuration: Configuration = request.param
    log = tmp_path_factory.mktemp("hook-only") / "server.log"
    flags = ["--model-path", str(model_path), "--vtoken-policy", "none", "--vtoken-check"]
    flags += [*POOL_FLAGS, *configuration.flags()]
    server = ServerProcess(flags, log=log, entry=configuration.entry, environment=STRICT_CHECKS)
    with server:
        cold = run_mix(server, mix)
        # Without a cache a second round is the first one again.
        warm = run_mix(server, mix) if configuration.radix else cold
        info = server.get("/server_info").json()
    return Served(configuration, cold, warm, info, server.log)


def test_answers_equal_stock(served: Served, stock_answers: dict[str, Answer]) -> None:
    assert against_answers(stock_answers, served.cold) == []


def test_answers_over_a_warm_cache_equal_stock(
    served: Served, stock_answers: dict[str, Answer]
) -> None:
    assert against_answers(stock_answers, served.warm) == []


def test_answers_equal_transformers(served: Served, mix: Mix, reference: Reference) -> None:
    lines: list[str] = []
    for case in mix.cases():
        if case.exact:
            lines += against_transformers(case, served.cold, reference)
    assert lines == []


def test_the_configuration_was_in_force(served: Served) -> None:
    wanted = served.configuration
    assert served.info["page_size"] == wanted.page_size
    cached = served.warm["whole prompt cached"].cached
    assert (cached >= 256) if wanted.radix else (cached == 0)
    assert served.info["vtoken"]["version"] == __version__, "the scheduler did not attest"


def test_no_checker_complained(served: Served) -> None:
    assert complaints(served.log) == []
