"""The check of evictions against the plain model: it agrees with itself and notices a swap."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vtoken_sglang_eval.eager_attention import Choice, EagerReference, expected_evicted, unexplained
from vtoken_sglang_eval.policy_reference import SCORES

PROMPT, ANSWER = list(range(5, 205)), list(range(30, 54))
LENGTH, KEPT, SINK, RECENT = 201, 80, 4, 32


@pytest.fixture(scope="module")
def reference() -> EagerReference:
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(3)
    return EagerReference(LlamaForCausalLM(config).float())


def choice_of(reference: EagerReference, policy: str) -> Choice:
    seen = reference.observe([*PROMPT, *ANSWER], {}, first_query=0, last_chunk=(128, len(PROMPT)))
    return expected_evicted(
        SCORES[policy](seen, LENGTH), range(LENGTH), length=LENGTH, kept=KEPT, sink=SINK,
        recent=RECENT, page_size=16,
    )  # fmt: skip


@pytest.mark.parametrize("policy", sorted(SCORES))
def test_a_swap_of_the_best_for_the_worst_is_noticed(
    reference: EagerReference, policy: str
) -> None:
    choice = choice_of(reference, policy)
    assert len(choice.evicted) == LENGTH - KEPT
    assert min(choice.evicted) >= SINK
    assert unexplained(choice, choice.evicted, 0.0) == []
    spared = [pos for pos in choice.candidates if pos not in choice.evicted]
    best = max(spared, key=lambda pos: float(choice.scores[pos]))
    worst = min(choice.evicted, key=lambda pos: float(choice.scores[pos]))
    swapped = sorted({*choice.evicted, best} - {worst})
    assert len(unexplained(choice, swapped, 1e-9)) == 1


def test_too_few_and_forbidden_evictions_are_noticed(reference: EagerReference) -> None:
    choice = choice_of(reference, "tova")
    assert unexplained(choice, choice.evicted[:-1], 1e9)
    assert unexplained(choice, [*choice.evicted[:-1], LENGTH - 1], 1e9)
