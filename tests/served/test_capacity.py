"""Reclaimed memory as concurrency on a real server: length, storms, and who is retracted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import PRODUCT, ServerProcess
from tests.helpers.server_log import complaints
from tests.served.configurations import STRICT_CHECKS

pytestmark = pytest.mark.server

POOL = 320  # tokens
ASKED_FOR = ("must leave a prompt", "maximum allowed length")  # refusals that a test provokes
VOCABULARY = range(200, 40_000)
SHORT = ("--vtoken-recent", "16")
COMMON = (
    *("--page-size", "16", "--chunked-prefill-size", "64"),
    *("--mem-fraction-static", "0.3", "--vtoken-policy", "streaming_llm"),
    "--vtoken-check",
)


@contextmanager
def serving(model: Path, log: Path, *flags: str, pool: int = POOL) -> Iterator[ServerProcess]:
    """A server with every check on; on leaving, nothing is held and no checker has complained."""
    command = ["--model-path", str(model), "--max-total-tokens", str(pool), *COMMON, *flags]
    with ServerProcess(command, log=log, entry=PRODUCT, environment=STRICT_CHECKS) as server:
        yield server
        after = state(server)
        assert after["pruned_rows"] == after["held_pages"] == after["retained_pages"] == 0
        assert server.exit_status is None
    assert [line for line in complaints(server.log) if not any(a in line for a in ASKED_FOR)] == []


def state(server: ServerProcess) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/server_info").json()["internal_states"][0]["vtoken"]
    return found


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=length)


def payload(ids: Sequence[int], tokens: int, **options: Any) -> dict[str, Any]:
    return {
        "input_ids": list(ids),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": tokens,
            "min_new_tokens": tokens,  # not ignore_eos: SGLang then reserves less than may come
            "custom_params": {"vtoken": options},
        },
    }


def generated(answer: Any) -> int:
    return int(answer["meta_info"]["completion_tokens"])


def test_a_request_outgrows_the_pool_and_others_do_not_notice(
    model_path: Path, tmp_path: Path
) -> None:
    """Prompts and answers longer than the pool, beside an unpruned request that is answered as it
    is alone; what cannot fit is told what would."""
    with serving(model_path, tmp_path / "server.log", "--vtoken-budget", "64", *SHORT) as server:
        plain = payload(prompt(100, 1), 24, policy="none")
        alone = server.generate(plain)
        long_prompt = payload(prompt(700, 2), 8)
        long_answer = payload(prompt(40, 3), 300, publish="never")
        answers = server.generate_concurrently([long_prompt, long_answer, plain])
        assert [generated(answer) for answer in answers] == [8, 300, 24]
        assert answers[2]["output_ids"] == alone["output_ids"]
        after = state(server)
        assert after["outgrown_requests"] == 2
        assert after["retractions"] == 0
        for options in ({"policy": "random", "keep": 0.9}, {"policy": "snapkv"}):
            fit = named_limit(server, 700, options)
            at_limit = server.generate(payload(prompt(fit, 2), 8, **options))
            assert 0 < generated(at_limit) <= 8
            assert named_limit(server, fit + 1, options) == fit
        for options in ({"policy": "random", "keep": 0.9}, {"policy": "none"}):
            clipped = server.generate(payload(prompt(200, 4), 500, **options))
            assert generated(clipped) == POOL - 16 - 208 - 1
            assert clipped["meta_info"]["finish_reason"]["type"] == "length"
        unpruned = server.post("/generate", payload(prompt(700, 2), 8, policy="none"))
        assert unpruned.status_code == 400
        assert "maximum allowed length" in unpruned.text


def named_limit(server: ServerProcess, length: int, options: dict[str, Any]) -> int:
    """What a refusal says to be the longest prompt that would be served."""
    refused = server.post("/generate", payload(prompt(length, 2), 8, **options))
    assert refused.status_code == 400, refused.text
    message = refused.json()["error"]["message"]
    assert f"must leave a prompt of {length} tokens room" in message
    return int(message.partition("a prompt of up to ")[2].split()[0])


@pytest.mark.slow
def test_a_large_answer_is_clipped_pruned_or_not(model_path: Path, tmp_path: Path) -> None:
    """Clients with a large default for the answer are served as before pruning was switched on."""
    flags = ("--vtoken-budget", "512", "--chunked-prefill-size", "512")
    with serving(model_path, tmp_path / "server.log", *flags, pool=4096) as server:
        for options in ({"policy": "random", "keep": 0.9}, {"policy": "none"}):
            answer = server.generate(payload(prompt(3990, 6), 2000, **options))
            assert generated(answer) == 4096 - 16 - 4000 - 1
            assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert state(server)["retractions"] == 0


def storm(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests whose pruning lags: rare and scattered evictions, prompts of every length, a
    third of them on a few shared prefixes, some not pruned at all, some longer than the pool."""
    draw = random.Random(seed)
    prefixes = [prompt(96, seed + n) for n in range(3)]
    found = []
    for number in range(count):
        options: dict[str, Any] = {
            "policy": draw.choice(["random", "random", "streaming_llm", "none"]),
            "interval": draw.choice([4, 16, 64]),
            "shared": draw.choice(["skip", "mask", "cow", "auto"]),
            "publish": draw.choice(["prompt", "never"]),
        }
        if options["policy"] == "none":
            options = {"policy": "none"}
        else:
            options |= draw.choice([{"keep": 0.3}, {"budget": 64}, {"budget": 128}])
        start = draw.choice(prefixes) if number % 3 == 0 else []
        ids = start + prompt(draw.randint(1, 200), seed * 1000 + number)
        found.append(payload(ids, draw.choice([1, 16, 40, 64]), **options))
    longest = prompt(1000, seed)
    found.append(payload(longest, 16, policy="streaming_llm", budget=64, interval=200))
    found.append(payload(prompt(30, seed), 500, policy="random", budget=64, interval=16))
    draw.shuffle(found)
    return sorted(found, key=lambda body: -body["sampling_params"]["max_new_tokens"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [(), ("--disable-radix-cache",), ("--enable-mixed-chunk",)])
def test_a_storm_whose_pruning_lags_waits_its_turn(
    model_path: Path, tmp_path: Path, schedule: tuple[str, ...]
) -> None:
    """Far more than the pool holds, at once: everything is answered in full, in the end."""
    flags = ("--vtoken-budget", "64", *SHORT, "--max-running-requests", "24", *schedule)
    requests = storm(32, seed=5)
    with serving(model_path, tmp_path / "server.log", *flags, pool=512) as server:
        answers = server.generate_concurrently(requests)
        wrong = [
            (number, answer["meta_info"])
            for number, (request, answer) in enumerate(zip(requests, answers, strict=True))
            if generated(answer) != request["sampling_params"]["max_new_tokens"]
        ]
        assert wrong == []
        after = state(server)
        assert after["admitted_by_pruning"] > 0
        assert server.get("/health").status_code == 200


def counted(model: Path, log: Path, *flags: str) -> dict[str, Any]:
    """Counters after ten requests that all want more than SGLang reserves for them, and whose
    evictions come late.

    Unpruned they want 10 x 176 tokens. Pruned, each may hold its budget of 4 pages and the one it
    writes: 50 of the pool's 56, the rest for copies.
    """
    requests = [payload(prompt(48, n), 128, interval=96, publish="never") for n in range(10)]
    flags = ("--vtoken-budget", "64", "--vtoken-recent", "16", *flags)
    flags = (*flags, "--schedule-conservativeness", "0.01")
    with serving(model, log, *flags, pool=896) as server:
        answers = server.generate_concurrently(requests)
        assert {generated(answer) for answer in answers} == {128}
        return state(server)


@pytest.mark.slow
def test_reclaim_comes_before_retraction(model_path: Path, tmp_path: Path) -> None:
    """The same requests, admitted alike: what is reclaimed in time need not be taken back."""
    alike = ("--vtoken-ablation", "full-admission")
    off = counted(model_path, tmp_path / "off.log", *alike[:1], alike[1] + ",retract")
    on = counted(model_path, tmp_path / "on.log", *alike)
    assert off["retractions"] > 0
    assert off["early_evictions"] == 0
    assert on["retractions"] == 0
    assert on["early_evictions"] > 0


@pytest.mark.slow
def test_expected_footprint_admits_more_at_once(model_path: Path, tmp_path: Path) -> None:
    """Eight requests that together fit only when pruned: full lengths let in fewer of them."""
    requests = [payload(prompt(200, n), 60) for n in range(8)]
    peaks = {}
    for admission in ("expected", "full"):
        flags = ("--vtoken-keep", "0.3", "--vtoken-publish", "never")
        log = tmp_path / f"{admission}.log"
        flags += ("--vtoken-ablation", "full-admission") if admission == "full" else ()
        with serving(model_path, log, *flags, pool=1024) as server:
            server.generate_concurrently(requests)
            after = state(server)
        peaks[admission] = peak_running(server.log)
        assert (after["admitted_by_pruning"] > 0) == (admission == "expected")
        assert after["retractions"] == 0
    assert peaks["expected"] > peaks["full"]


def peak_running(log: str) -> int:
    """The maximum of requests that decoded at once, by SGLang's own log."""
    lines = [line for line in log.splitlines() if "#running-req:" in line]
    return max(int(line.partition("#running-req:")[2].split(",")[0]) for line in lines)
