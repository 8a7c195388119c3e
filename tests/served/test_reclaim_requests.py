"""What one request asks for holds for that request alone: its neighbours are served as by stock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.masked_reference import Trace, evictions_of, read_trace
from tests.helpers.reference import Reference
from tests.helpers.server import PRODUCT, ServerProcess
from tests.helpers.server_log import complaints
from tests.served.comparisons import against_answers
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS
from tests.served.mix import Answer, Case, Mix, run_mix
from tests.served.pruned_mix import pruned_case

pytestmark = [pytest.mark.server, pytest.mark.slow]

CHAT = [
    {"role": "system", "content": "Answer in whole sentences. " * 12},
    {"role": "user", "content": "Tell me how paper is made, step by step."},
]
CHAT_OPTIONS = {"policy": "streaming_llm", "budget": 64, "recent": 16, "interval": 4}
CHAT_TOKENS = 40
GREEDY = {"temperature": 0, "ignore_eos": True}
REFUSED = ("vtoken.keep", "vtoken.sauce", "logprob_start_len", "beam_width")


@dataclass(frozen=True, slots=True)
class Seen:
    """Answers to the unpruned mix sent amid pruned neighbours, chats by request id, the trace."""

    amid: dict[str, Answer]
    chats: dict[str, str]
    refused: list[httpx.Response]
    trace: Trace
    log: str


@pytest.fixture(scope="module")
def seen(model_path: Path, mix: Mix, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("requests")
    trace, log = folder / "trace.jsonl", folder / "server.log"
    flags = ["--model-path", str(model_path), *POOL_FLAGS, "--page-size", "16"]
    flags += ["--vtoken-policy", "random", "--vtoken-keep", "0.5", "--vtoken-check"]
    flags += ["--vtoken-trace", str(trace)]
    with ServerProcess(flags, log=log, entry=PRODUCT, environment=STRICT_CHECKS) as server:
        amid = run_mix(server, amid_neighbours(mix))
        chats = {
            rid: server.chat(CHAT, rid=rid, max_tokens=CHAT_TOKENS, **GREEDY, **more)
            for rid, more in {
                "chat, own options": {"custom_params": {"vtoken": CHAT_OPTIONS}},
                "chat, defaults": {},
                "chat, none": {"custom_params": {"vtoken": {"policy": "none"}}},
            }.items()
        }
        refused = [server.post(path, body) for path, body in bad_requests()]
    texts = {rid: chat["choices"][0]["message"]["content"] for rid, chat in chats.items()}
    return Seen(amid, texts, refused, read_trace(trace), log.read_text("utf-8"))


def amid_neighbours(mix: Mix) -> Mix:
    """The concurrent cases of the mix, unpruned, each beside one that is pruned all the time."""
    together: list[Case] = []
    for number, case in enumerate(mix.together):
        plain = {"custom_params": {"vtoken": {"policy": "none"}}}
        named = {**case.fields, "rid": case.name}
        together.append(replace(case, sampling={**case.sampling, **plain}, fields=named))
        prompt = case.prompt[::-1] * 2 + mix.alone[2].prompt[:60]
        options = {"interval": 1, "keep": 0.3, "publish": ("never", "prompt")[number % 2]}
        together.append(pruned_case(f"neighbour {number}", prompt, 40, **options))
    return Mix([], together, [], [])


def bad_requests() -> list[tuple[str, dict[str, Any]]]:
    """In the order of `REFUSED`."""
    chat = {"messages": CHAT, "max_tokens": 4, "custom_params": {"vtoken": {"sauce": 1}}}
    prompt_logprobs = {"return_logprob": True, "logprob_start_len": 0}
    return [
        ("/generate", generate_body({"custom_params": {"vtoken": {"keep": 7}}})),
        ("/v1/chat/completions", {"model": "default", **chat}),
        ("/generate", generate_body() | prompt_logprobs),
        ("/generate", generate_body({"beam_width": 2})),
    ]


def generate_body(sampling: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text": "Hello", "sampling_params": {"max_new_tokens": 4, **(sampling or {})}}


def test_requests_that_are_not_pruned_answer_like_stock(
    seen: Seen, stock_answers: dict[str, Answer]
) -> None:
    plain = {name: answer for name, answer in seen.amid.items() if "neighbour" not in name}
    assert len(plain) == 8
    assert against_answers({name: stock_answers[name] for name in plain}, plain) == []
    assert not any(rid in seen.trace for rid in plain)


def test_their_neighbours_were_pruned_meanwhile(seen: Seen) -> None:
    for number in range(8):
        assert len(seen.trace[f"neighbour {number}"]) > 10


@pytest.mark.parametrize("rid", ["chat, own options", "chat, defaults", "chat, none"])
def test_chat_completions_take_options(
    seen: Seen, reference: Reference, encode_chat: Callable[[Any], list[int]], rid: str
) -> None:
    evictions = seen.trace.get(rid, [])
    assert bool(evictions) == (rid != "chat, none")
    if rid == "chat, own options":
        assert evictions[0].evicted[0] == 4  # the oldest after the sinks: the window, not at random
    best = reference.greedy(encode_chat(CHAT), CHAT_TOKENS, evictions_of(evictions))
    text = reference.tokenizer.decode(best.tokens, skip_special_tokens=True)
    assert seen.chats[rid] == text


@pytest.fixture
def encode_chat(reference: Reference) -> Callable[[Any], list[int]]:
    def encode(messages: Any) -> list[int]:
        tokenizer = reference.tokenizer
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return encode


@pytest.mark.parametrize(("number", "field"), enumerate(REFUSED), ids=REFUSED)
def test_what_is_not_served_is_refused_by_name(seen: Seen, number: int, field: str) -> None:
    assert seen.refused[number].status_code == 400
    assert f"{field}: " in seen.refused[number].text


def test_no_checker_complained(seen: Seen) -> None:
    refusals = [f"[http_server] Error: {field}: " for field in REFUSED]  # of the requests above
    left = [line for line in complaints(seen.log) if not any(text in line for text in refusals)]
    assert left == []
