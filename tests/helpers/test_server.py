"""The server harness against small scripts: it must notice everything it claims to notice."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import alive
from tests.helpers.server import ServerProcess, ServerStartError, run_to_exit

HEALTHY = """
import http.server, json, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(400 if "bad" in body else 200, body)
    def log_message(self, *words):
        print("asked", self.path, flush=True)

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
"""


@pytest.fixture(autouse=True)
def own_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VTOKEN_TEST_SERVER_LOCK", str(tmp_path / "lock"))


def script(folder: Path, text: str) -> str:
    path = folder / "fake_server.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_healthy_server_answers_and_is_gone_afterwards(tmp_path: Path) -> None:
    with ServerProcess([], log=tmp_path / "log", entry=[script(tmp_path, HEALTHY)]) as server:
        assert server.generate({"text": "x"}) == {"text": "x"}
        with pytest.raises(AssertionError, match="HTTP 400"):
            server.generate({"bad": 1})
        assert server.generate_concurrently([{"text": str(i)} for i in range(4)]) == [
            {"text": str(i)} for i in range(4)
        ]
        assert "asked /generate" in server.log
        pid = server.pid
    assert not psutil.pid_exists(pid)
    assert server.exit_status == 0


def test_a_start_that_fails_is_reported_with_the_log(tmp_path: Path) -> None:
    text = "raise SystemExit('the model is missing')"
    with (
        pytest.raises(ServerStartError, match=r"(?s)ended with status 1.*the model is missing"),
        ServerProcess([], log=tmp_path / "log", entry=[script(tmp_path, text)]),
    ):
        pass


def test_a_silent_start_is_given_up(tmp_path: Path) -> None:
    entry = [script(tmp_path, "import time; time.sleep(300)")]
    server = ServerProcess([], log=tmp_path / "log", entry=entry, start_timeout=1)
    with pytest.raises(ServerStartError, match="not ready after 1 s"), server:
        pass
    assert not psutil.pid_exists(server.pid)


def test_a_child_that_outlives_its_server_is_reported_and_ended(tmp_path: Path) -> None:
    server = ServerProcess([], log=tmp_path / "log", entry=[script(tmp_path, ORPHAN + HEALTHY)])
    with pytest.raises(AssertionError, match=r"outlived the server: \['\d+ .*time.sleep"):  # noqa: SIM117
        with server:
            children = psutil.Process(server.pid).children()
    assert len(children) == 1
    assert not alive(children[0])


def test_an_error_inside_the_block_still_ends_the_server(tmp_path: Path) -> None:
    server = ServerProcess([], log=tmp_path / "log", entry=[script(tmp_path, HEALTHY)])
    with pytest.raises(KeyError), server:
        raise KeyError("from the test")
    assert not psutil.pid_exists(server.pid)


def test_a_command_that_ends_is_returned_with_what_it_left(tmp_path: Path) -> None:
    done = run_to_exit(["-c", ORPHAN + "print('no'); raise SystemExit(3)"], tmp_path / "log")
    assert done.status == 3
    assert done.output == "no\n"
    assert len(done.leftovers) == 1
    pid = int(done.leftovers[0].split()[0])
    assert not psutil.pid_exists(pid) or not alive(psutil.Process(pid))


def test_a_command_that_does_not_end_is_ended(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="still running after 1 s"):
        run_to_exit(["-c", "import time; time.sleep(300)"], tmp_path / "log", timeout=1)


def test_a_killed_test_run_takes_its_server_along(tmp_path: Path) -> None:
    holder = tmp_path / "holder.py"
    holder.write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path.cwd())!r})\n"
        "from pathlib import Path\n"
        "from tests.helpers.server import ServerProcess\n"
        f"entry = [{script(tmp_path, HEALTHY)!r}]\n"
        f"with ServerProcess([], log=Path({str(tmp_path / 'log')!r}), entry=entry) as server:\n"
        f"    Path({str(tmp_path / 'pid')!r}).write_text(str(server.pid))\n"
        "    time.sleep(300)\n",
        encoding="utf-8",
    )
    process = psutil.Popen([sys.executable, str(holder)])
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    pid = int((tmp_path / "pid").read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(pid)
