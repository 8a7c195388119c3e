"""Workload `reasoning`: short questions and long answers, so that almost all KV is generated.

A prompt is a shared set of instructions (`system_tokens`, the same for `sharing` sessions, 0: all)
and one arithmetic puzzle made from the seed. Answers run over their whole length, drawn around
`out_tokens`, as a reasoning model's do. An answer counts as right if it contains the result.
"""

from __future__ import annotations

import random

from vtoken_sglang_eval.chat import ChatTokenizer, clip_tokens, first_prompt
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.sharegpt import Dataset

from .base import Session, Workload, drawn_lengths, mean

INSTRUCTIONS = (
    "Solve the problem step by step. Write every step on a line of its own, check each of them, "
    "and end with the result. Group {group}."
)
HINTS = (
    " Write down what is given before you begin.",
    " Name the unit of every number.",
    " If a step looks wrong, say so, go back, and do it again in another way.",
    " Estimate the result first and compare the estimate with what you found.",
    " Keep intermediate results exact; round only at the end.",
)
GOODS = ("apples", "bolts", "books", "candles", "stamps", "marbles", "bricks", "tickets")


def build(options: Options, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Build one single-turn session per `conversations`; `dataset` is not used."""
    generator = random.Random(options.seed)
    count = options.shape("conversations", 24)
    degree = options.shape("sharing", 0) or count
    sessions = []
    for index in range(count):
        system = instructions(index // degree, options.shape("system_tokens", 128), tokenizer)
        puzzle, result = make_puzzle(generator)
        sessions.append(
            Session(
                session=index,
                first_prompt=tuple(first_prompt(tokenizer, system, puzzle)),
                answer_tokens=drawn_lengths(options.shape("out_tokens", 256), 1, generator),
                expected=((str(result),),),
            )
        )
    lengths = [len(session.first_prompt) for session in sessions]
    return Workload(
        name="reasoning",
        sessions=tuple(sessions),
        facts={
            "sharing_degree": degree,
            "mean_prompt_tokens": mean(lengths),
        },
    )


def instructions(group: int, tokens: int, tokenizer: ChatTokenizer) -> str:
    """The instructions of one group of sessions, at most about `tokens` tokens."""
    text = INSTRUCTIONS.format(group=group + 1)
    number = 0
    while len(tokenizer.encode(text)) < tokens:
        text += HINTS[number % len(HINTS)]
        number += 1
    return clip_tokens(tokenizer, text, tokens)


def make_puzzle(generator: random.Random) -> tuple[str, int]:
    """An arithmetic word problem and its result."""
    boxes, each = generator.randint(12, 60), generator.randint(12, 60)
    lost, goods = generator.randint(5, 99), generator.choice(GOODS)
    text = (
        f"A shop receives {boxes} boxes with {each} {goods} in each. {lost} {goods} are broken, "
        f"and half of the boxes' number in {goods} is given away (round down). "
        f"How many {goods} are left?"
    )
    return text, boxes * each - lost - boxes // 2
