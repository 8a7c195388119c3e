"""Reading on and answering: full attention as stock transformers, policies as the engine runs them.

The engine's own kept sets are compared with this reference by `quality served`.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM
from vtoken_sglang_eval.quality.cells import FULL, Cell, grid, policy_names
from vtoken_sglang_eval.quality.look import Pruner
from vtoken_sglang_eval.quality.reference import ReferenceModel
from vtoken_sglang_eval.quality.runs import HELD_BACK, answer, beginning, branch, read_on

from tests.eval.test_quality_reference import masked, stock_model, tokens

PROMPT = HELD_BACK + 70


@pytest.fixture(scope="module")
def stock() -> LlamaForCausalLM:
    return stock_model()


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel(stock_model())


def prompt_ids() -> list[int]:
    ids: list[int] = tokens(PROMPT, 5)[0].tolist()
    return ids


def test_reading_with_full_attention_is_the_stock_loss(
    model: ReferenceModel, stock: LlamaForCausalLM
) -> None:
    prompt, text = prompt_ids(), tokens(40, 6)[0].tolist()
    options = [cell.options(16) for cell in grid(["random"], [0.5])]
    whole = torch.tensor([[*prompt, *text]])
    logits = masked(stock, whole, {})[0][PROMPT:-1]
    expected = float(cross_entropy(logits, whole[0, PROMPT + 1 :]))
    for step in (0, 16):
        lanes, _ = branch(beginning(model, prompt, options), prompt, options, len(text))
        full, pruned = read_on(lanes, options, text, step=step)
        assert full.surprise == pytest.approx(expected, rel=1e-3)
        assert pruned.surprise != pytest.approx(expected, rel=1e-3)
        assert (full.live, full.length) == (PROMPT + 40, PROMPT + 40)
        # The last look comes before the last part is read.
        seen = PROMPT if step == 0 else PROMPT + 32
        assert pruned.live == -(-seen // 2) + PROMPT + 40 - seen


def test_only_the_asked_part_is_scored(model: ReferenceModel, stock: LlamaForCausalLM) -> None:
    prompt, text = prompt_ids(), tokens(20, 7)[0].tolist()
    options = [FULL.options(16)]
    whole = torch.tensor([[*prompt, *text]])
    logits = masked(stock, whole, {})[0][PROMPT + 14 : -1]
    expected = float(cross_entropy(logits, whole[0, PROMPT + 15 :]))
    for step in (0, 4):
        lanes, _ = branch(beginning(model, prompt, options), prompt, options, len(text))
        (found,) = read_on(lanes, options, text, step=step, scored_from=15)
        assert found.surprise == pytest.approx(expected, rel=1e-3)
    with pytest.raises(ValueError, match="scored_from"):
        read_on(lanes, options, text, step=0, scored_from=0)


def greedy(
    stock: LlamaForCausalLM,
    prompt: list[int],
    generated: list[int],
    evictions: dict[int, list[int]],
) -> list[int]:
    """What greedy decoding picks at each step of `generated`: equal to it if it is greedy."""
    ids = [*prompt, *generated[:-1]]
    acting = {query: dead for query, dead in evictions.items() if query < len(ids)}
    best: list[int] = masked(stock, torch.tensor([ids]), acting)[0].argmax(-1).tolist()
    return best[len(prompt) - 1 :]


@pytest.mark.parametrize("asked_later", [False, True])
def test_answers_are_greedy_under_the_evictions(
    model: ReferenceModel, stock: LlamaForCausalLM, asked_later: bool
) -> None:
    prompt = prompt_ids()
    question = tokens(9, 8)[0].tolist() if asked_later else []
    cells = grid(policy_names(), [0.4])
    options = [cell.options(16) for cell in cells]
    lanes, logits = branch(beginning(model, prompt, options), prompt, options, 30)
    found = answer(lanes, logits, options, question, tokens=20, end_tokens=(), page_size=4)
    for cell, one in zip(cells, found, strict=True):
        evictions = dict(one.evicted)
        if cell == FULL:
            assert evictions == {}
        else:
            # Later the first generated token is in the cache when the policy first looks.
            first = PROMPT if asked_later else PROMPT + 1
            assert list(evictions)[:2] == [first, first + 16]
            assert len(evictions[first]) == first - -(-first * 4 // 10)
        expected = greedy(stock, [*prompt, *question], one.token_ids, evictions)
        assert one.token_ids == expected, cell


def test_an_answer_ends_at_an_end_token(model: ReferenceModel) -> None:
    prompt, options = prompt_ids(), [FULL.options(16)]

    def ask(end_tokens: list[int]) -> list[int]:
        lanes, logits = branch(beginning(model, prompt, options), prompt, options, 12)
        (found,) = answer(lanes, logits, options, [], tokens=8, end_tokens=end_tokens, page_size=1)
        return found.token_ids

    whole = ask([])
    assert len(whole) == 8
    assert ask([whole[3]]) == whole[: whole.index(whole[3]) + 1]


def test_what_is_evicted_is_what_the_policy_says(model: ReferenceModel) -> None:
    prompt = prompt_ids()
    cells = [Cell("streaming_llm", 0.5), Cell("random", 0.5), Cell("h2o", 0.5)]
    options = [cell.options(16) for cell in cells]
    lanes, _ = branch(beginning(model, prompt, options), prompt, options, 1)
    total = lanes.gathered[0].values(2)
    pruner = Pruner(lanes, options)
    pruner.look()
    pruner.look()  # nothing is due before the interval has passed
    streaming, random, heavy = (evicted for ((_, evicted),) in pruner.evicted)
    assert streaming == list(range(4, 4 + PROMPT // 2))
    assert random != streaming
    candidates = range(4, PROMPT - 32)
    lightest = sorted(candidates, key=lambda pos: float(total[pos]))[: PROMPT // 2]
    assert heavy == sorted(lightest)
    assert pruner.live().tolist() == [PROMPT - PROMPT // 2] * 3
