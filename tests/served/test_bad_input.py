"""What a user gets wrong ends in one clear line and leaves nothing running."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.patched_sglang import stage
from tests.helpers.server import (
    COMMON_FLAGS,
    PRODUCT,
    STOCK,
    ExitedCommand,
    ServerProcess,
    run_to_exit,
)
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS

pytestmark = pytest.mark.server

Refuse = Callable[..., ExitedCommand]
ENTRIES = pytest.mark.parametrize("entry", [PRODUCT, STOCK], ids=["vtoken-sglang", "launch_server"])


@pytest.fixture
def refuse(model_path: Path, tmp_path: Path) -> Refuse:
    """Run a serve command that must end by itself, without a traceback, leaving nothing."""

    def run(
        *flags: str,
        entry: Sequence[str] = PRODUCT,
        model: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> ExitedCommand:
        command = [*entry, "--model-path", model or str(model_path), *COMMON_FLAGS, *flags]
        done = run_to_exit(command, tmp_path / "output.log", environment=environment)
        assert done.status != 0, done.output
        assert "Traceback" not in done.output
        assert done.leftovers == []
        return done

    return run


def our_line(done: ExitedCommand) -> str:
    """The single line we wrote."""
    lines = [line for line in done.output.splitlines() if line.startswith("vtoken-sglang")]
    assert len(lines) == 1, done.output
    return lines[0]


def test_missing_model(refuse: Refuse, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-model")
    line = our_line(refuse("--vtoken-policy", "none", model=missing))
    assert "--model-path: must exist" in line
    assert missing in line


def test_port_in_use(refuse: Refuse) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        line = our_line(refuse("--vtoken-policy", "none", "--port", port))
    assert "--port: must be free" in line
    assert port in line


@ENTRIES
def test_unknown_policy(refuse: Refuse, entry: Sequence[str]) -> None:
    line = our_line(refuse("--vtoken-policy", "best", entry=entry))
    assert "--vtoken-policy: must be an installed policy" in line
    assert "'best'" in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--vtoken-policy", "none", "--vtoken-polcy", "x"), "--vtoken-polcy: is not an option"),
        (("--vtoken-keep", "0.5"), "--vtoken-keep: needs --vtoken-policy"),
        (("--vtoken-policy", "none", "--vtoken-sink", "-1"), "--vtoken-sink: must be at least 0"),
        (("--vtoken-policy", "none", "--vtoken-sink"), "--vtoken-sink"),
        (
            ("--vtoken-policy", "h2o", "--vtoken-keep", "0.5", "--vtoken-observe-layers", "none"),
            "--vtoken-policy: looks at attention, and this server observes none",
        ),
    ],
)
def test_bad_option(refuse: Refuse, flags: tuple[str, ...], said: str) -> None:
    assert said in our_line(refuse(*flags))


def test_unsupported_mode(refuse: Refuse) -> None:
    line = our_line(refuse("--vtoken-policy", "none", "--speculative-algorithm", "NGRAM"))
    assert "--speculative-algorithm NGRAM is not supported" in line
    assert "Remedy" in line


def test_a_flag_that_sglang_does_not_know(refuse: Refuse) -> None:
    done = refuse("--vtoken-policy", "none", "--no-such-flag")
    last = done.output.rstrip().splitlines()[-1]
    assert last.endswith("error: unrecognized arguments: --no-such-flag")  # SGLang's own words


@pytest.mark.parametrize(
    ("entry", "source"),
    [(PRODUCT, "srt/mem_cache/memory_pool.py"), (STOCK, "srt/server_args.py")],
    ids=["vtoken-sglang", "launch_server"],
)
def test_sglang_changed_at_a_hook(
    refuse: Refuse, tmp_path: Path, entry: Sequence[str], source: str
) -> None:
    """A file of the scheduler's and one of the launcher's."""
    changed = stage(tmp_path, f"sglang/{source}") / "sglang" / source
    changed.write_bytes(changed.read_bytes() + b"# changed by someone\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    line = our_line(refuse("--vtoken-policy", "none", entry=entry, environment=environment))
    assert f": sglang/{source} differs from the supported release (sha256 " in line
    assert "Remedy: reinstall the supported sglang" in line


@pytest.fixture(scope="module")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("bad-input") / "server.log"
    flags = ["--model-path", str(model_path), "--vtoken-policy", "random", *POOL_FLAGS]
    flags += ["--vtoken-keep", "1.0"]
    with ServerProcess(flags, log=log, entry=PRODUCT, environment=STRICT_CHECKS) as running:
        yield running


def request_with(options: object) -> dict[str, Any]:
    return {
        "text": "The capital of France is",
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": 4,
            "custom_params": {"vtoken": options},
        },
    }


@pytest.mark.parametrize(
    ("options", "said", "value"),
    [
        ("fast", "vtoken: must be an object of options", "'fast'"),
        ({"bugdet": 64}, "vtoken.bugdet: is not an option", "64"),
        ({"sink": -3}, "vtoken.sink: must be at least 0", "-3"),
        ({"sink": "4"}, "vtoken.sink: must be of type int", "'4'"),
        ({"policy": "best"}, "vtoken.policy: must be an installed policy", "'best'"),
        ({"recent": 1.5}, "vtoken.recent: must be of type int, or a share", "1.5"),
        ({"policy_args": {"window": 3}}, "vtoken.policy_args.window: is not a parameter", "3"),
        (
            {"policy": "snapkv", "policy_args": {"kernel": 4}},
            "vtoken.policy_args.kernel: kernel must be an odd number",
            "4",
        ),
    ],
)
def test_malformed_request_option(
    server: ServerProcess, options: object, said: str, value: str
) -> None:
    response = server.post("/generate", request_with(options))
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert said in message
    assert value in message


def nested(depth: int, kind: str) -> str:
    """JSON, since neither json nor httpx writes it at any depth."""
    opening, closing = ("[", "]") if kind == "list" else ('{"a":', "}")
    return opening * depth + "1" + closing * depth


ROUTES = {
    "/generate": '{"text":"hi","sampling_params":{"max_new_tokens":1,"custom_params":%s}}',
    "/v1/completions": '{"model":"default","prompt":"hi","max_tokens":1,"custom_params":%s}',
    "/v1/chat/completions": '{"model":"default","messages":[{"role":"user","content":"hi"}],'
    '"max_tokens":1,"custom_params":%s}',
}
PLACES = {
    "keep": '{"vtoken":{"keep":%s}}',
    "vtoken": '{"vtoken":%s}',
    "unknown": '{"vtoken":{"x":%s}}',
    "argument": '{"vtoken":{"policy_args":{"window":%s}}}',
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_nesting_of_any_depth_is_answered_with_400(
    server: ServerProcess, route: str, depth: int
) -> None:
    """Past 1,024 levels by SGLang's JSON parser, up to there by us."""
    for kind in ("list", "object"):
        for place in PLACES.values():
            body = ROUTES[route] % (place % nested(depth, kind))
            before = len(server.log)
            response = server.post(route, body)
            assert response.status_code == 400, response.text[:500]
            assert len(response.text) < 1000
            assert "Traceback" not in server.log[before:]
            assert max(map(len, server.log[before:].splitlines()), default=0) < 1000


@pytest.mark.parametrize("route", ROUTES)
def test_names_and_values_of_any_length_come_back_short(server: ServerProcess, route: str) -> None:
    long = "o" * 1_000_000
    for custom in (
        f'{{"vtoken":{{"{long}":1}}}}',
        f'{{"vtoken":{{"shared":"{long}"}}}}',
        f'{{"vtoken":{{"policy":"{long}"}}}}',
        f'{{"vtoken":{{"policy_args":{{"{long}":"{long}"}}}}}}',
        f'{{"vtoken":"{long}"}}',
    ):
        before = len(server.log)
        response = server.post(route, ROUTES[route] % custom)
        assert response.status_code == 400
        assert len(response.text) < 1000, (route, custom[:40])
        assert max(map(len, server.log[before:].splitlines()), default=0) < 1000


def test_malformed_option_of_a_chat_request(server: ServerProcess) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 4,
        "custom_params": {"vtoken": {"sink": -3}},
    }
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    assert "vtoken.sink: must be at least 0" in response.text


def test_well_formed_options_are_accepted(server: ServerProcess) -> None:
    for options in (
        {"sink": 8, "publish": "never"},
        {"recent": 0.5, "budget": 60},
        {"policy": "snapkv", "policy_args": {"window": 8, "kernel": 3}},
    ):
        answer = server.generate(request_with(options))
        assert answer["meta_info"]["completion_tokens"] == 4


def test_a_client_that_leaves_does_not_stop_the_server(server: ServerProcess) -> None:
    payload = {
        "text": "Once upon a time",
        "sampling_params": {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True},
    }
    events = server.stream(payload)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert server.generate(request_with({}))["meta_info"]["completion_tokens"] == 4
    assert server.get("/health").status_code == 200
