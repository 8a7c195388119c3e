"""Served from an SGLang that carries the series of `patches/`: the plugin uses its call-outs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.extra_plugin import write_plugin
from tests.helpers.patched_sglang import patch, stage
from tests.helpers.server import PRODUCT, ServerProcess
from tests.helpers.server_log import complaints
from tests.helpers.tiny_model import save_tiny_model
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS
from tests.served.test_negative_controls import FLAGS, REQUEST

pytestmark = pytest.mark.server

# Puts into /server_info what the scheduler's process has at the call-outs, and which hooks it has.
REPORT = """\
from sglang.srt.managers.scheduler_components import pool_stats_observer
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def report(output, scheduler, *_args, **_more):
    output.internal_state["at_call_outs"] = [
        f.__module__ + "." + f.__name__
        for f in (
            type(scheduler).forward_launched_listener,
            pool_stats_observer.private_tokens_of,
            ForwardBatch.kv_lens_of,
        )
    ]
    output.internal_state["hooked"] = sorted(HookRegistry._patched)
    return output

target = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
HookRegistry.register(target, report, HookType.AFTER)"""


def test_call_outs_take_the_place_of_hooks(model_path: Path, tmp_path: Path) -> None:
    patched = stage(tmp_path / "patched")
    assert patch(patched).returncode == 0
    write_plugin(patched, "vtoken_report", REPORT)
    model = save_tiny_model(tmp_path / "tiny", model_path)
    flags = ["--model-path", str(model), *POOL_FLAGS, *FLAGS, "--vtoken-check"]
    environment = {**STRICT_CHECKS, "PYTHONPATH": str(patched)}
    log = tmp_path / "server.log"
    with ServerProcess(flags, log=log, entry=PRODUCT, environment=environment) as server:
        assert len(server.generate(REQUEST)["output_ids"]) == 40
        (state,) = server.get("/server_info").json()["internal_states"]
        assert complaints(server.log) == []
    assert state["vtoken"]["repacks"] > 0
    hooks = "vtoken_sglang.engine.hooks"
    assert state["at_call_outs"] == [
        f"{hooks}.forward.note_forward",
        f"{hooks}.scheduler.private_tokens_of",
        f"{hooks}.forward.kv_lens_of",
    ]
    hooked = {name.rpartition(".")[2] for name in state["hooked"]}
    assert "free_kv_row" in hooked
    assert not hooked & {"forward_batch_generation", "kv_private_tokens", "init_new"}
