"""Requests as SGLang's tokenizer manager makes them, judged by our hook on it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.runtime_context import get_context
from sglang.srt.sampling.sampling_params import SamplingParams

from vtoken_sglang.engine.hooks.launcher import validate_request
from vtoken_sglang.errors import ConfigError
from vtoken_sglang.options import ENVIRONMENT_VARIABLE, VTokenConfig

PROMPT = list(range(100, 110))
HALVED = VTokenConfig(policy="random", keep=0.5)
UNPRUNED = {"custom_params": {"vtoken": {"policy": "none"}}}


@pytest.fixture(autouse=True)
def published() -> Iterator[None]:
    """SGLang's process-wide arguments, as the manager has them."""
    with get_context().override_server_args(page_size=16):
        yield


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, HALVED.to_json())


def manager() -> TokenizerManager:
    """One with what it takes to make a request of token ids."""
    made = TokenizerManager.__new__(TokenizerManager)
    made.preferred_sampling_params = None
    made.sampling_params_class = SamplingParams
    made.tokenizer = None
    made.model_config = SimpleNamespace(vocab_size=1000)
    made.server_args = get_context().server_args
    return made


def ask(body: GenerateReqInput | EmbeddingReqInput) -> None:
    """From the HTTP body to our hook, as in a process with hooks; raises what the user is told."""
    body.normalize_batch_and_arguments()
    made = manager()
    stats = SimpleNamespace(set_tokenize_finish_time=lambda: None)
    made.rid_to_state = {body.rid: SimpleNamespace(time_stats=stats)}
    arguments = (body, None, PROMPT)
    validate_request(made._create_tokenized_object(*arguments), made, *arguments)


def generate(sampling: dict[str, Any] | None = None, **fields: Any) -> GenerateReqInput:
    return GenerateReqInput(input_ids=PROMPT, sampling_params=sampling or {}, **fields)


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("start", [0, 3, len(PROMPT) - 1])
def test_prompt_logprobs_of_a_pruned_request_are_refused(start: int) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(generate(return_logprob=True, logprob_start_len=start))
    assert (caught.value.field, caught.value.value) == ("logprob_start_len", start)
    assert "pruned prefix" in str(caught.value)
    ask(generate(UNPRUNED, return_logprob=True, logprob_start_len=start))


@pytest.mark.usefixtures("serving")
def test_a_turn_of_a_session_asks_about_tokens_that_came_before() -> None:
    """SGLang counts the start from the session's first token, which is not in this prompt."""
    start = len(PROMPT)
    ask(generate(return_logprob=True, logprob_start_len=start))
    with pytest.raises(ConfigError, match="logprob_start_len"):
        ask(generate(return_logprob=True, logprob_start_len=start, session_params={"id": "a"}))


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"return_logprob": True},
        {"return_logprob": True, "logprob_start_len": -1},
        {"return_logprob": True, "logprob_start_len": len(PROMPT)},
        {"logprob_start_len": 0},  # ignored by SGLang without return_logprob
    ],
    ids=str,
)
def test_logprobs_of_output_tokens_are_served(fields: dict[str, Any]) -> None:
    ask(generate(**fields))


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("more", [{}, UNPRUNED], ids=["pruned", "unpruned"])
def test_beam_search_is_refused_for_every_request(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="beam_width: must be 1.* got 4"):
        ask(generate({"beam_width": 4, **more}))
    ask(generate({"beam_width": 1, **more}))


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize(
    ("custom", "said"),
    [
        ("fast", "custom_params: must be an object"),
        ({"vtoken": "fast"}, "vtoken: must be an object of options"),
        ({"vtoken": {"keep": 7}}, "vtoken.keep: must be above 0.0 and at most 1.0"),
        ({"vtoken": {"sauce": 1}}, "vtoken.sauce: is not an option"),
        ({"vtoken": {"policy": "best"}}, "vtoken.policy: must be an installed policy"),
    ],
    ids=str,
)
def test_malformed_options_are_refused(custom: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(generate({"custom_params": custom}))
    assert said in str(caught.value)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [{"a": value}]
    return value


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("depth", [10, 1_000, 100_000])
def test_options_of_any_depth_are_refused_in_one_short_line(depth: int) -> None:
    """SGLang's own way there copies and normalises the parameters without walking into them."""
    deep = nested(depth)
    for custom in (
        deep,
        {"vtoken": deep},
        {"vtoken": {"keep": deep}},
        {"vtoken": {"unknown": deep}},
        {"vtoken": {"policy_args": {"window": deep}}},
    ):
        with pytest.raises(ConfigError) as caught:
            ask(generate({"custom_params": custom}))
        assert len(str(caught.value)) < 400


@pytest.mark.usefixtures("serving")
def test_options_of_others_in_custom_params_are_not_ours() -> None:
    ask(generate({"custom_params": {"thinking_budget": 3, "vtoken": {"keep": 0.7}}}))
    ask(generate({"custom_params": {"thinking_budget": 3}}))


@pytest.mark.usefixtures("serving")
def test_an_embedding_request_has_nothing_to_refuse() -> None:
    ask(EmbeddingReqInput(input_ids=PROMPT))


def test_a_stock_server_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    ask(generate({"beam_width": 4}, return_logprob=True, logprob_start_len=0))
    ask(generate({"custom_params": {"vtoken": {"sauce": 1}}}))
