"""The supervisor: starts, waits, reports failures with the log, leaves nothing running."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from vtoken_sglang_eval.client import LoadClient
from vtoken_sglang_eval.errors import ConfigError, ServerError
from vtoken_sglang_eval.server import (
    SETTLE_S,
    ServerProcess,
    free_port,
    group_cpu_seconds,
    group_members,
    http_ok,
)
from vtoken_sglang_eval.workloads.base import Session, Workload

SCRIPT = Path(__file__).with_name("fake_server.py")


def fake(folder: Path, *flags: str, timeout: float = 60.0, port: int = 0) -> ServerProcess:
    chosen = port or free_port()
    command = [sys.executable, str(SCRIPT), "--port", str(chosen), *flags]
    return ServerProcess(command, chosen, folder / "server.log", startup_timeout=timeout)


def one_session() -> Workload:
    session = Session(
        session=0, first_prompt=(1, 2, 3), later_turns=((4, 5),), answer_tokens=(3, 4)
    )
    return Workload(name="test", sessions=(session,))


def exists(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_answers_while_entered_and_is_gone_after(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    with fake(tmp_path, "--child-file", str(child_file)) as server:
        assert http_ok(f"{server.base_url}/health")
        assert server.cpu_seconds() > 0
        assert server.startup_s > 0
        child = int(child_file.read_text())
        assert exists(child)
    assert not exists(child)  # the whole process group ends, not only its leader
    assert not http_ok(f"{server.base_url}/health")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_when_the_body_raises(tmp_path: Path, error: type[BaseException]) -> None:
    child_file = tmp_path / "child"
    with (
        pytest.raises(error),
        fake(tmp_path, "--child-file", str(child_file)),
    ):
        raise error
    assert not exists(int(child_file.read_text()))


def test_a_second_interrupt_leaves_nothing_either(tmp_path: Path) -> None:
    """As when somebody presses Ctrl-C again while a server takes its time to end."""
    child_file = tmp_path / "child"
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    server = fake(tmp_path, "--fail", "deaf", "--child-file", str(child_file)).__enter__()
    child = int(child_file.read_text())
    assert exists(child)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            server.stop()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert not exists(child)


def test_an_early_exit_shows_status_and_log(tmp_path: Path) -> None:
    with pytest.raises(ServerError) as caught, fake(tmp_path, "--fail", "exit"):
        pytest.fail("entered")
    message = str(caught.value)
    assert "exit status 3 before it answered" in message
    assert "ValueError: the fake model is not to be found" in message
    assert "server.log" in message


def test_a_server_that_never_answers_is_ended(tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    server = fake(tmp_path, "--fail", "hang", "--child-file", str(child_file), timeout=6.0)
    with pytest.raises(ServerError, match="did not answer within 6 s"), server:
        pytest.fail("entered")
    assert not exists(int(child_file.read_text()))


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port: must be free .in use., got {port}"):
            fake(tmp_path, port=port).__enter__()
    assert not (tmp_path / "server.log").exists()


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text("precious")
    with pytest.raises(FileExistsError):
        fake(tmp_path).__enter__()
    assert (tmp_path / "server.log").read_text() == "precious"


def test_a_server_that_dies_while_answering(tmp_path: Path) -> None:
    with fake(tmp_path, "--fail", "die") as server:
        trace = LoadClient(server.base_url, 0.1).run(one_session())
        assert len(trace.records) == 1  # the session stops at its first failure
        assert trace.records[0].error
        with pytest.raises(ServerError, match="the fake model ran out of luck"):
            server.require_alive("while it was measured", SETTLE_S)


@pytest.mark.parametrize(
    ("fail", "text"),
    [("refuse", "HTTP 500: no thanks"), ("short", "2 tokens came back, 3 were asked for")],
)
def test_a_bad_answer_is_recorded(tmp_path: Path, fail: str, text: str) -> None:
    with fake(tmp_path, "--fail", fail) as server:
        trace = LoadClient(server.base_url, 0.1).run(one_session())
    assert [record.error for record in trace.records] == [text]


def test_a_later_turn_carries_the_generated_answer(tmp_path: Path) -> None:
    calls: list[int] = []
    with fake(tmp_path) as server:
        trace = LoadClient(server.base_url, 0.05).run(one_session(), lambda: calls.append(1))
    first, second = trace.records
    assert first.error == second.error == ""
    assert first.output_ids == (6, 13, 20)  # sum of the prompt, then seven more each
    assert second.prompt_tokens == 3 + 3 + 2
    assert second.output_ids[0] == (6 + 6 + 13 + 20 + 9) % 97
    assert len(second.gaps_s) == 3
    assert len(calls) == 2
    assert 0 < first.ttft_s <= first.latency_s <= trace.duration_s


def test_process_group_accounting_sees_this_process() -> None:
    group = os.getpgid(0)
    assert os.getpid() in group_members(group)
    assert group_cpu_seconds(group) > 0
