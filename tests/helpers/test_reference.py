"""The oracle against itself: a tiny random Llama, seconds, no server."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.reference import Reference, visible_keys

PROMPT = [5, 9, 2, 41, 17, 3, 28, 11]
COUNT = 6


@pytest.fixture(scope="module")
def tiny() -> Reference:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,  # the default's 0.02 makes a model that barely looks at context
    )
    return Reference(LlamaForCausalLM(config))


def logprobs_in_one_pass(tiny: Reference, tokens: list[int], visible: torch.Tensor) -> list[float]:
    ids = [*PROMPT, *tokens]
    rows = tiny.forward(ids[:-1], visible[:-1, :-1])
    first = len(PROMPT) - 1
    return [float(rows[first + step, token]) for step, token in enumerate(tokens)]


def test_stepwise_greedy_equals_transformers_generate(tiny: Reference) -> None:
    generated = tiny.model.generate(
        torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None
    )
    assert tiny.greedy(PROMPT, COUNT).tokens == generated[0, len(PROMPT) :].tolist()


def test_the_best_continuation_of_greedy_tokens_is_themselves(tiny: Reference) -> None:
    stepwise = tiny.greedy(PROMPT, COUNT)
    best = tiny.best_continuation(PROMPT, stepwise.tokens)
    assert best.tokens == stepwise.tokens
    torch.testing.assert_close(best.logprobs, stepwise.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(best.margins, stepwise.margins, rtol=0, atol=4e-5)


def test_the_best_continuation_shows_a_wrong_token(tiny: Reference) -> None:
    tokens = tiny.greedy(PROMPT, COUNT).tokens
    wrong = [*tokens[:2], (tokens[2] + 1) % 64, *tokens[3:]]
    assert tiny.best_continuation(PROMPT, wrong).tokens[:3] == tokens[:3]


@pytest.mark.parametrize(
    "evictions",
    [None, {len(PROMPT): [0, 3]}, {4: [1], 9: [2, 7], 12: [8]}],
    ids=["no eviction", "after the prompt", "inside the prompt, twice later"],
)
def test_stepwise_evictions_equal_one_masked_pass(
    tiny: Reference, evictions: dict[int, list[int]] | None
) -> None:
    stepwise = tiny.greedy(PROMPT, COUNT, evictions)
    visible = visible_keys(len(PROMPT) + COUNT, evictions)
    expected = logprobs_in_one_pass(tiny, stepwise.tokens, visible)
    torch.testing.assert_close(stepwise.logprobs, expected, rtol=0, atol=2e-5)


def test_a_eviction_changes_later_steps_only(tiny: Reference) -> None:
    step = len(PROMPT) + 2
    plain, evicted = tiny.greedy(PROMPT, COUNT), tiny.greedy(PROMPT, COUNT, {step: [0, 1, 2, 3]})
    before = step - len(PROMPT) + 1  # the query at `step` produces the token with this index
    assert evicted.logprobs[:before] == plain.logprobs[:before]
    assert evicted.logprobs[before] != pytest.approx(plain.logprobs[before], abs=1e-2)


def test_a_position_cannot_be_evicted_before_it_exists() -> None:
    with pytest.raises(ValueError, match="eviction at query 3"):
        visible_keys(8, {3: [3]})


def test_margins_are_gaps_to_the_second_best(tiny: Reference) -> None:
    answer = tiny.greedy(PROMPT, 1)
    two = tiny.forward(PROMPT)[-1].topk(2).values
    assert answer.margins[0] == pytest.approx(float(two[0] - two[1]), abs=2e-5)
