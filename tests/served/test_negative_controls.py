"""SGLang's own checkers really watch what the hooks protect: take one away, and they fire.

The product has no switch for this. A plugin that only these tests install breaks one method in
the server's processes, and the same request that is otherwise served well brings it down.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import httpx
import pytest

from tests.helpers.extra_plugin import write_plugin
from tests.helpers.server import PRODUCT, ServerProcess
from tests.helpers.server_log import complaints
from tests.helpers.tiny_model import save_tiny_model
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS

pytestmark = pytest.mark.server

FLAGS = (
    *("--page-size", "16", "--chunked-prefill-size", "64"),
    *("--vtoken-policy", "random", "--vtoken-keep", "0.4", "--vtoken-publish", "never"),
)
REQUEST = {
    "input_ids": list(range(700, 1000)),
    "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
}


@dataclass(frozen=True, slots=True)
class Sabotage:
    """One broken method, and the words of the checker that must notice.

    Fields:
        module, owner, method: what is replaced.
        body: the new method's body.
        expected: what the log must say.
    """

    module: str
    owner: str
    method: str
    body: str
    expected: str

    def __str__(self) -> str:
        return self.method


SABOTAGES = (
    Sabotage(
        "vtoken_sglang.engine.runtime.runtime",
        "Runtime",
        "private_tokens",
        "return None",  # as without the hook on kv_private_tokens
        "Full Pool Mem Leak",
    ),
    Sabotage(
        "vtoken_sglang.engine.runtime.runtime", "Runtime", "owns", "return False", "in free_segment"
    ),
    Sabotage("vtoken_sglang.core.rows", "RequestRows", "zero", "pass", "KV page use-after-free"),
)


def install(sabotage: Sabotage | None, folder: Path) -> None:
    """Write a plugin package into `folder`, found by SGLang once the folder is on PYTHONPATH."""
    body = "pass"
    if sabotage is not None:
        body = dedent(f"""\
            from {sabotage.module} import {sabotage.owner} as owner
            if not callable(getattr(owner, "{sabotage.method}", None)):
                raise SystemExit("sabotage: nothing to break")
            def broken(*_args, **_more):
                {sabotage.body}
            owner.{sabotage.method} = broken""")
    write_plugin(folder, "vtoken_sabotage", body)


@pytest.fixture(scope="module")
def tiny_model(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), model_path)


def serve(sabotage: Sabotage | None, model: Path, folder: Path) -> ServerProcess:
    install(sabotage, folder)
    environment = {**STRICT_CHECKS, "PYTHONPATH": str(folder)}
    flags = ["--model-path", str(model), *POOL_FLAGS, *FLAGS]
    log = folder / "server.log"
    return ServerProcess(flags, log=log, entry=PRODUCT, environment=environment, graceful=False)


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=str)
def test_the_checker_fires(sabotage: Sabotage, tiny_model: Path, tmp_path: Path) -> None:
    with serve(sabotage, tiny_model, tmp_path) as server:
        with pytest.raises((httpx.TransportError, AssertionError)):
            server.generate(REQUEST)
        assert sabotage.expected in server.log
        assert "Traceback" in server.log


def test_the_same_request_is_served_well_with_an_idle_plugin(
    tiny_model: Path, tmp_path: Path
) -> None:
    with serve(None, tiny_model, tmp_path) as server:
        assert len(server.generate(REQUEST)["output_ids"]) == 40
        (state,) = server.get("/server_info").json()["internal_states"]
        assert state["vtoken"]["repacks"] > 0
        assert complaints(server.log) == []
