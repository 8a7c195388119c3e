"""The check of evictions against the plain model: it agrees with itself and notices a swap."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vtoken_sglang_eval.bench import policy_scores
from vtoken_sglang_eval.bench.policy_scores import (
    KEEP,
    RECENT,
    SINK,
    Found,
    check,
    figures_of,
    read_evictions,
)
from vtoken_sglang_eval.eager_attention import EagerReference, expected_evicted
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.policy_reference import SCORES

PROMPT, ANSWER = list(range(5, 205)), list(range(30, 54))


@pytest.fixture(scope="module")
def reference() -> EagerReference:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    return EagerReference(LlamaForCausalLM(config).float())


def evictions_of(reference: EagerReference, policy: str) -> list[tuple[int, list[int]]]:
    """Two evictions, each chosen after the one before took effect."""
    found: list[tuple[int, list[int]]] = []
    dead: set[int] = set()
    for length in (201, 217):
        seen = reference.observe(
            [*PROMPT, *ANSWER], dict(found), first_query=0, last_chunk=(128, len(PROMPT)),
            page_size=16,
        )  # fmt: skip
        choice = expected_evicted(
            SCORES[policy](seen, length),
            [pos for pos in range(length) if pos not in dead],
            length=length,
            kept=math.ceil(KEEP * length),
            sink=SINK,
            recent=RECENT,
            page_size=16,
        )
        found.append((length, choice.evicted))
        dead.update(choice.evicted)
    return found


@pytest.mark.parametrize("policy", sorted(SCORES))
def test_right_evictions_pass_and_a_swap_does_not(reference: EagerReference, policy: str) -> None:
    answer = {"meta_info": {"cached_tokens": 0}, "output_ids": ANSWER}
    evictions = evictions_of(reference, policy)
    assert all(evicted for _, evicted in evictions)
    found = Found()
    check(reference, policy, PROMPT, answer, evictions, found)
    assert (found.evictions, found.mismatches, found.swapped) == (2, 0, 0)
    length, evicted = evictions[0]
    scores = SCORES[policy](
        reference.observe(
            [*PROMPT, *ANSWER], {}, first_query=0, last_chunk=(128, len(PROMPT)), page_size=16
        ),
        length,
    )
    spared = [pos for pos in range(SINK, 160) if pos not in evicted]
    best = max(spared, key=lambda pos: float(scores[pos]))
    worst = min(evicted, key=lambda pos: float(scores[pos]))
    swapped = sorted({*evicted, best} - {worst})
    found = Found()
    check(reference, policy, PROMPT, answer, [(length, swapped)], found)
    assert (found.evictions, found.mismatches, found.swapped) == (1, 1, 1)


def test_a_trace_is_read_by_request(tmp_path: Path) -> None:
    lines = [
        {"rid": "a", "logical_len": 9, "evicted": [1, 2]},
        {"rid": "b", "logical_len": 7, "evicted": [0]},
        {"rid": "a", "logical_len": 12, "evicted": [3]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert read_evictions(trace) == {"a": [(9, [1, 2]), (12, [3])], "b": [(7, [0])]}


def test_figures_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"h2o": Found(3, 40, 2, 1), "tova": Found(2, 10, 0, 0)}
    figures = figures_of(found)
    assert figures["score_mismatches"]["value"] == 1
    assert "of 5" in figures["score_mismatches"]["unit"]
    assert figures["score_swapped_h2o"]["value"] == pytest.approx(0.05)
    assert figures["score_mismatches_tova"]["value"] == 0
    assert 0 < figures["max_policy_lines"]["value"] < 50
    monkeypatch.setattr(policy_scores, "BUILT_IN", {"base": "vtoken_sglang.policy.base:Policy"})
    assert figures_of(found)["max_policy_lines"]["value"] > 50


def test_a_policy_that_evicted_nothing_was_not_checked() -> None:
    with pytest.raises(FiguresError, match="nothing was evicted under tova"):
        figures_of({"h2o": Found(3, 40, 2, 1), "tova": Found()})
