"""What is refused at start-up, whatever asks for it, and what stays stock."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.fresh_process import CHECK, run_python
from tests.helpers.patched_sglang import stage
from vtoken_sglang import SUPPORTED_SGLANG_VERSION
from vtoken_sglang.cli import main
from vtoken_sglang.engine.hooks import launcher as launch_hooks
from vtoken_sglang.engine.plugin import installation
from vtoken_sglang.engine.plugin import registration as plugin
from vtoken_sglang.engine.plugin.attestation import ATTESTATION_KEY, expected_attestation
from vtoken_sglang.engine.plugin.upstream import UPSTREAM_SHA256
from vtoken_sglang.errors import HookError
from vtoken_sglang.options import ENVIRONMENT_VARIABLE, VTokenConfig


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


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a copy of the `sglang` package."""
    files = [f"sglang/{source}" for source in UPSTREAM_SHA256]
    return stage(tmp_path_factory.mktemp("staged"), *files) / "sglang"


@pytest.mark.parametrize("source", sorted(UPSTREAM_SHA256))
def test_a_local_change_of_any_file_we_build_on_is_refused(
    staged: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file with a hash is compared."""
    monkeypatch.setattr(installation, "package_root", lambda: staged)
    released = (staged / source).read_bytes()
    (staged / source).write_bytes(released + b"# changed\n")
    with pytest.raises(HookError, match=f"hook upstream: sglang/{source} differs"):
        installation.verify_installation()
    (staged / source).unlink()
    with pytest.raises(HookError, match=f"sglang/{source} differs .*no file"):
        installation.verify_installation()
    (staged / source).write_bytes(released)
    installation.verify_installation()


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
    assert "hook check_attestation: scheduler 1" in capsys.readouterr().err


def test_stock_server_needs_no_attestation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    launch_hooks.check_attestation([{"status": "ready"}])


def test_data_parallel_controller_forwards_only_agreement() -> None:
    class Controller:
        _scheduler_init_infos = [{ATTESTATION_KEY: {"config": "a"}}] * 2

    assert launch_hooks.forward_attestation({}, Controller()) == {ATTESTATION_KEY: {"config": "a"}}
    Controller._scheduler_init_infos = [{ATTESTATION_KEY: {"config": "a"}}, {}]
    assert launch_hooks.forward_attestation({}, Controller()) == {}
