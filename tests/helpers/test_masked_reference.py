"""The oracle of eviction masks what the trace says, no more and no less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.masked_reference import Eviction, evictions_of, masked_continuation, read_trace
from tests.helpers.reference import Reference

PROMPT = [5, 17, 3, 60, 41, 22, 9, 33, 12, 50, 8, 27]


@pytest.fixture(scope="module")
def tiny() -> Reference:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return Reference(LlamaForCausalLM(config).float())


def test_one_pass_equals_step_by_step_decoding_under_evictions(tiny: Reference) -> None:
    evictions = {8: (1, 4), 14: (2, 7, 10), 17: (12,)}
    stepwise = tiny.greedy(PROMPT, 8, evictions)
    got = masked_continuation(tiny, PROMPT, stepwise.tokens, evictions)
    assert got.tokens == stepwise.tokens
    assert got.logprobs == pytest.approx(stepwise.logprobs, abs=1e-5)


def test_a_eviction_one_step_later_changes_the_answer(tiny: Reference) -> None:
    early = masked_continuation(tiny, PROMPT, PROMPT[:6], {13: (2, 5, 9)})
    late = masked_continuation(tiny, PROMPT, PROMPT[:6], {14: (2, 5, 9)})
    differs = [a != b for a, b in zip(early.logprobs, late.logprobs, strict=True)]
    # Row i comes from the query at position 11 + i: only the one at 13 sees a difference itself,
    # the later ones through the states that it left behind.
    assert differs[:2] == [False, False]
    assert differs[2]


def test_evictions_after_the_last_query_change_nothing(tiny: Reference) -> None:
    plain = masked_continuation(tiny, PROMPT, PROMPT[:4], {})
    assert masked_continuation(tiny, PROMPT, PROMPT[:4], {15: (0, 1)}) == plain


def test_the_trace_is_read_by_request(tmp_path: Path) -> None:
    lines = [
        {"rid": "a", "logical_len": 9, "evicted": [1, 2]},
        {"rid": "b", "logical_len": 5, "evicted": [0]},
        {"rid": "a", "logical_len": 12, "evicted": [7]},
    ]
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace(path)
    assert trace == {"a": [Eviction(9, (1, 2)), Eviction(12, (7,))], "b": [Eviction(5, (0,))]}
    assert evictions_of(trace["a"]) == {9: (1, 2), 12: (7,)}


@pytest.mark.parametrize(
    "evictions",
    [
        [Eviction(9, (1,)), Eviction(12, (1,))],
        [Eviction(9, (1,)), Eviction(9, (2,))],
        [Eviction(9, (1,)), Eviction(8, (2,))],
    ],
)
def test_a_trace_of_a_disturbed_run_is_refused(evictions: list[Eviction]) -> None:
    with pytest.raises(ValueError):
        evictions_of(evictions)
