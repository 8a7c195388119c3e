"""The reference against stock transformers, its gathered weights against explicit ones."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vtoken_sglang_eval.eager_attention import EagerReference
from vtoken_sglang_eval.quality.reference import Lanes, ReferenceModel

from vtoken_sglang.policy.base import Gather, Observation, Pool

LAYERS, HEADS, WINDOW = 2, 4, 7
TOTAL, LAST = Observation(Gather.TOTAL), Observation(Gather.LAST)
PROMPT_END, BELOW_UNIFORM = (
    Observation(Gather.PROMPT_END, 6),
    Observation(Gather.BELOW_UNIFORM, WINDOW),
)
LARGEST = Observation(Gather.PROMPT_END, 6, Pool.MAX)
EVERYTHING = (TOTAL, LAST, PROMPT_END, BELOW_UNIFORM, LARGEST)


def stock_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=256,
        attn_implementation="eager",
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).float().eval()
    for parameter in model.parameters():  # larger weights, so that attention is far from even
        parameter.data.mul_(8 if parameter.dim() == 2 else 1)
    return model


@pytest.fixture(scope="module")
def stock() -> LlamaForCausalLM:
    return stock_model()


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel(stock_model())


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (1, count), generator=torch.Generator().manual_seed(seed))


def masked(
    stock: LlamaForCausalLM, ids: torch.Tensor, evictions: dict[int, list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, vocabulary] and weights [layers, heads, n, n]: queries from `evictions`' keys on
    do not see its values."""
    count = ids.shape[1]
    visible = torch.tril(torch.ones(count, count, dtype=torch.bool))
    for query, positions in evictions.items():
        visible[query:, positions] = False
    mask = torch.zeros(count, count).masked_fill(~visible, -1e30)[None, None]
    with torch.inference_mode():
        out = stock(ids, attention_mask=mask, use_cache=False, output_attentions=True)
    return out.logits[0], torch.stack([layer[0] for layer in out.attentions])


def test_lanes_with_different_evictions_equal_a_masked_forward(
    model: ReferenceModel, stock: LlamaForCausalLM
) -> None:
    prompt, rest = tokens(300), tokens(12, 1)
    assert prompt.shape[1] > 256  # more than one block of queries
    trunk = Lanes(model, [EVERYTHING], 300, 300)
    trunk.feed(prompt[:, :140])
    whole = trunk.fork([EVERYTHING], 300, 300)
    whole.feed(prompt[:, 140:])
    lanes = whole.fork([(TOTAL,), (), (BELOW_UNIFORM,)], 312, 300)
    first, later = [[5, 9, 250], [], [0, 17]], [[11, 303], [], [302]]
    for lane, dead in enumerate(first):
        lanes.alive[lane, dead] = False
    parts = [lanes.logits(lanes.feed(rest[:, :6].expand(3, -1)))]
    for lane, dead in enumerate(later):
        lanes.alive[lane, dead] = False
    parts += [lanes.logits(lanes.feed(rest[:, at : at + 1].expand(3, -1))) for at in range(6, 12)]
    for lane in range(3):
        evictions = {300: first[lane], 306: later[lane]}
        logits, weights = masked(stock, torch.cat([prompt, rest], dim=1), evictions)
        found = torch.cat(parts, dim=1)[lane]
        torch.testing.assert_close(found, logits[300:], rtol=1e-3, atol=1e-3)
        if lane == 0:
            (part,) = [part for part in lanes.gathered if part.observation == TOTAL]
            total = weights.mean(dim=(0, 1)).sum(dim=0)
            torch.testing.assert_close(part.values(0), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cuts", [(40,), (13, 14, 13), (1,) * 40])
def test_gathered_weights(
    model: ReferenceModel, stock: LlamaForCausalLM, cuts: tuple[int, ...]
) -> None:
    ids, count, prompt = tokens(40, 2), 40, 30
    lanes = Lanes(model, [EVERYTHING], count, prompt)
    at = 0
    for cut in cuts:
        lanes.feed(ids[:, at : at + cut])
        at += cut
    weights = masked(stock, ids, {})[1].mean(dim=(0, 1))
    each = masked(stock, ids, {})[1]
    share = 1 / torch.arange(1, count + 1)
    causal = torch.tril(torch.ones(count, count, dtype=torch.bool))
    rare = ((each < share[:, None]) & causal).float().mean(dim=(0, 1))
    begin = ((count - 1) // WINDOW - 1) * WINDOW
    expected = {
        TOTAL: (weights.sum(dim=0), count),
        LAST: (weights[-1], count),
        PROMPT_END: (weights[prompt - 6 : prompt].sum(dim=0), prompt - 6),
        BELOW_UNIFORM: (rare[begin:].sum(dim=0), count),
        LARGEST: (each[:, :, prompt - 6 : prompt].sum(dim=2).amax(dim=1).mean(dim=0), prompt - 6),
    }
    for part in lanes.gathered:
        values, observed_len = expected[part.observation]
        torch.testing.assert_close(part.values(0), values, rtol=1e-4, atol=1e-4)
        assert part.observed_len == observed_len


def test_a_fork_needs_one_lane_and_what_was_gathered(model: ReferenceModel) -> None:
    lane = Lanes(model, [(TOTAL,)], 4, 4)
    with pytest.raises(ValueError, match="not gathered"):
        lane.fork([(LAST,)], 8, 4)
    with pytest.raises(ValueError, match="single lane"):
        Lanes(model, [(), ()], 4, 4).fork([()], 8, 4)
    with pytest.raises(ValueError, match="capacity"):
        lane.feed(tokens(5))


def test_keys_are_those_of_the_positions(model: ReferenceModel) -> None:
    ids = tokens(20, 4)
    one = Lanes(model, [()], 20, 20)
    one.feed(ids)
    trunk = Lanes(model, [()], 20, 20)
    trunk.feed(ids[:, :15])
    two = trunk.fork([(), ()], 20, 20)
    two.feed(ids[:, 15:].expand(2, -1))
    positions = torch.tensor([0, 3, 14, 15, 19])
    for whole, parted in zip(one.keys_of(0, positions), two.keys_of(1, positions), strict=True):
        assert whole.shape == (5, 2, 8)
        torch.testing.assert_close(whole, parted, rtol=1e-4, atol=1e-5)


def test_keys_are_rotated_back(model: ReferenceModel, stock: LlamaForCausalLM) -> None:
    ids, positions = tokens(30, 4), torch.tensor([0, 3, 14, 29])
    lanes = Lanes(model, [()], 30, 30)
    lanes.feed(ids)
    seen = EagerReference(stock).observe(ids[0].tolist(), {}, first_query=0, last_chunk=(0, 30))
    found = list(lanes.keys_of(0, positions, before_rotary=True))
    for back, plain in zip(found, seen.plain_keys, strict=True):
        torch.testing.assert_close(back, plain[positions], rtol=1e-4, atol=1e-4)
