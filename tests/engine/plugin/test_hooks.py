"""Every hook resolves, is the one this code was written for, and fails closed when it is not."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vtoken_sglang import SUPPORTED_SGLANG_VERSION, patching
from vtoken_sglang.cli import main
from vtoken_sglang.engine.hooks import launcher as launch_hooks
from vtoken_sglang.engine.plugin import registration as plugin
from vtoken_sglang.engine.plugin.attestation import ATTESTATION_KEY, expected_attestation
from vtoken_sglang.engine.plugin.hook import (
    LAUNCHER_HOOKS,
    SCHEDULER_HOOKS,
    Hook,
    register,
    resolve_hook,
    verify_landed,
    verify_source,
)
from vtoken_sglang.engine.plugin.registration import installation
from vtoken_sglang.engine.plugin.upstream import UPSTREAM_SHA256
from vtoken_sglang.errors import HookError
from vtoken_sglang.options import ENVIRONMENT_VARIABLE, VTokenConfig

HOOKS_IN_PLACE = LAUNCHER_HOOKS + SCHEDULER_HOOKS
PATCHED = frozenset(patching.touched_files())


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.parametrize("hook", HOOKS_IN_PLACE, ids=lambda hook: hook.name)
def test_hook_is_complete_and_its_source_is_known(hook: Hook) -> None:
    assert hook.why
    assert hook.remove_when
    assert callable(resolve_hook(hook))
    verify_source(hook.name, hook.source, patching.package_root(), PATCHED)


def test_hook_names_and_targets_are_unique() -> None:
    assert len({hook.name for hook in HOOKS_IN_PLACE}) == len(HOOKS_IN_PLACE)
    assert len({hook.target for hook in HOOKS_IN_PLACE}) == len(HOOKS_IN_PLACE)


def test_changed_upstream_file_is_refused(tmp_path: Path) -> None:
    hook = next(hook for hook in HOOKS_IN_PLACE if hook.source not in PATCHED)
    copy = tmp_path / hook.source
    copy.parent.mkdir(parents=True)
    copy.write_bytes((patching.package_root() / hook.source).read_bytes() + b"# changed\n")
    with pytest.raises(HookError, match=f"hook {hook.name}: sglang/{hook.source} differs"):
        verify_source(hook.name, hook.source, tmp_path, PATCHED)


@pytest.mark.parametrize(
    "target", ["sglang.srt.managers.scheduler.Scheduler.no_such_method", "sglang.srt.nowhere.f"]
)
def test_wrong_target_is_refused(target: str) -> None:
    wrong = dataclasses.replace(SCHEDULER_HOOKS[0], target=target)
    with pytest.raises(HookError, match=r"attestation: target .* does not exist"):
        register(wrong)


def test_hook_that_did_not_land_is_noticed() -> None:
    # Nothing was applied to this function in this process.
    unhooked = dataclasses.replace(
        SCHEDULER_HOOKS[0], target="sglang.srt.managers.scheduler.Scheduler.release_host_resources"
    )
    with pytest.raises(HookError, match="did not land"):
        verify_landed(unhooked)


BROKEN_HOOK = """
import dataclasses
from vtoken_sglang.engine.plugin import registration as plugin
broken = dataclasses.replace(
    plugin.SCHEDULER_HOOKS[1], target="sglang.srt.managers.scheduler.Scheduler.renamed"
)
plugin.SCHEDULER_HOOKS = (broken,)
from sglang.srt.plugins import load_plugins
load_plugins()
print("served on")
"""

LOST_HOOK = """
from sglang.srt.plugins.hook_registry import HookRegistry
original = HookRegistry._apply_target.__func__
def lose_one(cls, target, hooks):
    if not target.endswith("free_kv_row"):
        original(cls, target, hooks)
HookRegistry._apply_target = classmethod(lose_one)
from sglang.srt.plugins import load_plugins
load_plugins()
print("served on")
"""


@pytest.mark.parametrize(
    ("code", "named"),
    [(BROKEN_HOOK, "safe-point"), (LOST_HOOK, "row-free")],
    ids=["target", "lost"],
)
def test_process_exits_when_a_hook_fails(code: str, named: str) -> None:
    """SGLang swallows what plugins raise; the process must end all the same, naming the hook."""
    done = run_python(code, **{ENVIRONMENT_VARIABLE: VTokenConfig().to_json()})
    assert done.returncode == 2
    assert f"vtoken-sglang: hook {named}:" in done.stderr
    assert "served on" not in done.stdout


CHECK = "from vtoken_sglang.cli import main; raise SystemExit(main(['check']))"


def test_check_passes_on_this_installation() -> None:
    done = run_python(CHECK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok  ") == len(HOOKS_IN_PLACE)


def test_missing_patch_stops_the_process(tmp_path: Path) -> None:
    overlay = patching.stage_pristine_overlay(tmp_path / "pristine")
    done = run_python(CHECK, PYTHONPATH=str(overlay))
    assert done.returncode == 2
    assert "patch is not applied" in done.stderr
    assert "vtoken-sglang patch --apply" in done.stderr


def test_excluded_plugin_is_noticed() -> None:
    done = run_python(CHECK, SGLANG_PLUGINS="something_else")
    assert done.returncode == 2
    assert "SGLANG_PLUGINS excludes it" in done.stderr


@pytest.fixture
def another_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation.importlib.metadata, "version", lambda _name: "0.6.0")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """This process is a launcher, asked for token virtualization in the way of the parameter."""
    flags = ["--vtoken-policy", "none"] if request.param == "flag" else []
    monkeypatch.setattr(plugin.sys, "argv", ["launch_server", "--model-path", "m", *flags])
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    if request.param == "environment":
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, VTokenConfig().to_json())


NOT_ASKED = pytest.mark.parametrize("asked", [None], indirect=True)
ASKED = pytest.mark.parametrize("asked", ["flag", "environment"], indirect=True)


@NOT_ASKED
@pytest.mark.usefixtures("another_sglang", "asked")
def test_without_options_another_sglang_stays_stock() -> None:
    before = plugin.registered_hooks()
    plugin.load()
    assert plugin.registered_hooks() == before


@ASKED
@pytest.mark.usefixtures("another_sglang", "asked")
def test_another_sglang_is_refused_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plugin.load()
    said = f"0.6.0 is installed, only {SUPPORTED_SGLANG_VERSION}"
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("another_sglang")
@pytest.mark.parametrize("command", ["serve", "check"])
def test_our_commands_name_the_version_they_need(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 2
    assert f"install sglang=={SUPPORTED_SGLANG_VERSION}" in capsys.readouterr().err


def test_a_missing_sglang_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_name: str) -> str:
        raise installation.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(installation.importlib.metadata, "version", version)
    with pytest.raises(HookError, match="sglang is not installed, only"):
        installation.require_version()


@ASKED
@pytest.mark.usefixtures("asked")
def test_whatever_fails_in_the_plugin_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang would log the exception and serve without us."""

    def broken(_hook: object) -> None:
        raise PermissionError(13, "Permission denied", "utils.py")

    monkeypatch.setattr(plugin, "register", broken)
    monkeypatch.setattr(plugin, "_registered", [])
    with pytest.raises(SystemExit):
        plugin.load()
    line = capsys.readouterr().err
    assert "hook plugin: could not be put in place (PermissionError" in line


@NOT_ASKED
@pytest.mark.usefixtures("asked")
def test_a_stock_server_is_not_stopped_by_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_hook: object) -> None:
        raise PermissionError

    monkeypatch.setattr(plugin, "register", broken)
    with pytest.raises(PermissionError):  # SGLang's business: it logs it and serves
        plugin.load()


@pytest.mark.parametrize("source", sorted(UPSTREAM_SHA256.keys() - PATCHED))
def test_a_local_change_of_any_file_we_build_on_is_refused(tmp_path: Path, source: str) -> None:
    copy = tmp_path / source
    with pytest.raises(HookError, match=f"sglang/{source} differs .*no file"):
        verify_source("upstream", source, tmp_path, PATCHED)
    copy.parent.mkdir(parents=True)
    copy.write_bytes((patching.package_root() / source).read_bytes())
    verify_source("upstream", source, tmp_path, PATCHED)
    copy.write_bytes(copy.read_bytes() + b"# changed\n")
    with pytest.raises(HookError, match=f"hook upstream: sglang/{source} differs"):
        verify_source("upstream", source, tmp_path, PATCHED)


def test_every_file_with_a_hash_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(
        installation, "verify_source", lambda _name, source, *_: compared.append(source)
    )
    installation.verify_installation(LAUNCHER_HOOKS)
    assert set(UPSTREAM_SHA256) <= set(compared)
    assert not PATCHED & set(UPSTREAM_SHA256) - {hook.source for hook in HOOKS_IN_PLACE}


NESTED = """
import multiprocessing, sys, time
from vtoken_sglang.engine.plugin.installation import refuse
from vtoken_sglang.errors import HookError

def scheduler():
    refuse(HookError("x", "is not there"))

def controller():
    multiprocessing.Process(target=scheduler).start()
    time.sleep(60)  # as SGLang's, it waits for the scheduler's word for ever

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    started = multiprocessing.Process(target=globals()[sys.argv[1]])
    started.start()
    started.join(50)
    print(started.exitcode)
"""


@pytest.mark.parametrize(("started", "status"), [("scheduler", 2), ("controller", -signal.SIGQUIT)])
def test_a_refusal_reaches_the_launcher(tmp_path: Path, started: str, status: int) -> None:
    """Its own child's it sees; below a controller the controller has to end."""
    script = tmp_path / "nested.py"
    script.write_text(NESTED)
    done = subprocess.run(
        [sys.executable, str(script), started],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "vtoken-sglang: hook x: is not there" in done.stderr
    assert done.stdout.split() == [str(status)]


@pytest.mark.parametrize(
    "info",
    [{"status": "ready"}, {ATTESTATION_KEY: {"version": "0"}}],
    ids=["no attestation", "another configuration"],
)
def test_scheduler_without_our_attestation_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], info: dict[str, object]
) -> None:
    config = VTokenConfig()
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, config.to_json())
    good = {ATTESTATION_KEY: expected_attestation(config)}
    launch_hooks.check_attestation([good])
    with pytest.raises(SystemExit):
        launch_hooks.check_attestation([good, info])
    assert "hook handshake: scheduler 1" in capsys.readouterr().err


def test_stock_server_needs_no_attestation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    launch_hooks.check_attestation([{"status": "ready"}])


def test_data_parallel_controller_forwards_only_agreement() -> None:
    class Controller:
        _scheduler_init_infos = [{ATTESTATION_KEY: {"config": "a"}}] * 2

    assert launch_hooks.forward_attestation({}, Controller()) == {ATTESTATION_KEY: {"config": "a"}}
    Controller._scheduler_init_infos = [{ATTESTATION_KEY: {"config": "a"}}, {}]
    assert launch_hooks.forward_attestation({}, Controller()) == {}
