"""The two things done on the reference: read on through a known text, and answer a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from vtoken_sglang.options import RequestOptions

from .look import Pruner, observations
from .reference import Lanes, ReferenceModel

# Kept back from a shared beginning, so that windows at the end of different prompts fit behind it.
HELD_BACK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the model expected of one text.

    Fields:
        surprise: mean negative log-likelihood, nats per scored token.
        exact: the most likely token was right at every scored place.
        live: tokens that were alive at the end, of `length`.
    """

    surprise: float
    exact: bool
    live: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A greedy answer: generated ids (end token included) and the evictions on the way."""

    token_ids: list[int]
    evicted: list[tuple[int, list[int]]]


def beginning(
    model: ReferenceModel, prompt: Sequence[int], options: Sequence[RequestOptions]
) -> Lanes:
    """One lane that has read all but the end of `prompt`, for `branch`."""
    everything = tuple(dict.fromkeys(item for one in options for item in observations(one)))
    trunk = Lanes(model, [everything], len(prompt), len(prompt))
    if len(prompt) > HELD_BACK:
        trunk.feed(torch.tensor([prompt[:-HELD_BACK]]))
    return trunk


def branch(
    trunk: Lanes, prompt: Sequence[int], options: Sequence[RequestOptions], room: int
) -> tuple[Lanes, Tensor]:
    """Lanes after `prompt`, one per entry of `options`, and the logits [vocabulary] behind it.

    Args:
        trunk: a lane that has read a beginning of `prompt`, HELD_BACK tokens short of it or more.
        room: tokens that each lane will be fed after it.
    """
    whole = trunk.fork(trunk.observed, len(prompt), len(prompt))
    hidden = whole.feed(torch.tensor([prompt[trunk.length :]]))
    lanes = whole.fork([*map(observations, options)], len(prompt) + room, len(prompt))
    return lanes, whole.logits(hidden[0, -1])


def read_on(
    lanes: Lanes,
    options: Sequence[RequestOptions],
    text: Sequence[int],
    *,
    step: int,
    scored_from: int = 1,
) -> list[Reading]:
    """Feed `text` to every lane and see how well it was expected; look for evicted before it and
    after each `step` tokens (0: before it only).

    Args:
        scored_from: index in `text` of the first token that counts, at least 1: the first token is
            expected by the prompt, before anything was pruned.
    """
    if not 1 <= scored_from < len(text):
        raise ValueError(f"scored_from: must be in [1, {len(text)}), got {scored_from}")
    pruner = Pruner(lanes, options)
    pruner.look()
    surprise = torch.zeros(lanes.count)
    exact = torch.ones(lanes.count, dtype=torch.bool)
    for begin in range(0, len(text), step or len(text)):
        if begin:
            pruner.look()
        end = min(len(text), begin + (step or len(text)))
        hidden = lanes.feed(torch.tensor(text[begin:end]).expand(lanes.count, -1))
        expected = torch.tensor(text[begin + 1 : end + 1])
        skip = max(0, scored_from - begin - 1)
        for lane in range(lanes.count):
            logits = lanes.logits(hidden[lane, skip : len(expected)])
            surprise[lane] += cross_entropy(logits, expected[skip:], reduction="sum")
            exact[lane] &= bool((logits.argmax(-1) == expected[skip:]).all())
    scored = len(text) - scored_from
    return [
        Reading(
            surprise=float(surprise[lane]) / scored,
            exact=bool(exact[lane]),
            live=int(pruner.live()[lane]),
            length=lanes.length,
        )
        for lane in range(lanes.count)
    ]


def answer(
    lanes: Lanes,
    logits: Tensor,
    options: Sequence[RequestOptions],
    question: Sequence[int],
    *,
    tokens: int,
    end_tokens: Sequence[int],
    page_size: int,
) -> list[Answer]:
    """Greedy answers of at most `tokens` tokens.

    Without a question the prompt holds it, and the lanes do what the served engine does: the first
    look comes when the first generated token is in the cache. With a question, the policy looks
    first and then the question is read.

    Args:
        logits: [vocabulary] behind the prompt.
    """
    pruner = Pruner(lanes, options, page_size)
    last = logits.expand(lanes.count, -1)
    if question:
        pruner.look()
        hidden = lanes.feed(torch.tensor(list(question)).expand(lanes.count, -1))
        last = lanes.logits(hidden[:, -1])
    found: list[list[int]] = [[] for _ in range(lanes.count)]
    ended = [False] * lanes.count
    for number in range(tokens):
        best = last.argmax(-1)
        for lane, token in enumerate(best.tolist()):
            if not ended[lane]:
                found[lane].append(token)
                ended[lane] = token in end_tokens
        if all(ended) or number + 1 == tokens:
            break
        if number:  # the token before this one is in the cache
            pruner.look()
        last = lanes.logits(lanes.feed(best[:, None])[:, -1])
    return [
        Answer(token_ids=ids, evicted=dead) for ids, dead in zip(found, pruner.evicted, strict=True)
    ]
