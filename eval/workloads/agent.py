"""Workload `agent`: tool-calling sessions under a long policy prompt, with a growing history.

Every session of a group of `sharing` (0: all) starts from the same policy of about
`system_tokens` tokens; groups differ in the firm they work for. A turn appends the result of a
tool, about `user_tokens` tokens, to what the model wrote; the model's "calls" are whatever it
generates, of fixed length. Text is made from the committed templates and the seed alone.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from vtoken_sglang_eval.chat import ChatTokenizer, clip_tokens, first_prompt, next_turn
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.sharegpt import Dataset

from .base import Session, Workload, drawn_lengths, mean

TEMPLATES = Path(__file__).parents[1] / "templates"
TOOLS = ("find_order", "get_customer", "list_shipments", "check_stock", "read_invoice")
STATES = ("open", "paid", "packed", "in transit", "delivered", "returned", "on hold")
GOODS = ("lamp", "kettle", "desk", "bicycle", "jacket", "camera", "carpet", "printer", "tent")


def build(options: Options, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Build one session per `conversations`; `dataset` is not used."""
    count = options.shape("conversations", 24)
    degree = options.shape("sharing", 0) or count
    generator = random.Random(options.seed)
    policies: dict[int, str] = {}
    sessions = []
    for index in range(count):
        group = index // degree
        if group not in policies:
            policies[group] = policy_text(
                f"Firm {group + 1}", options.shape("system_tokens", 512), tokenizer
            )
        sessions.append(_session(index, policies[group], options, tokenizer, generator))
    lengths = [len(tokenizer.encode(text)) for text in policies.values()]
    return Workload(
        name="agent",
        sessions=tuple(sessions),
        facts={
            "policies": len(policies),
            "sharing_degree": degree,
            "mean_policy_tokens": mean(lengths),
        },
    )


def policy_text(firm: str, tokens: int, tokenizer: ChatTokenizer) -> str:
    """About `tokens` tokens: an opening, then numbered rules, repeated for further departments."""
    opening, _, rest = (TEMPLATES / "agent_policy.txt").read_text("utf-8").partition("\n---\n")
    rules = [line for line in rest.splitlines() if line.strip()]
    parts = [opening.format(firm=firm, tools=", ".join(TOOLS))]
    missing = tokens - len(tokenizer.encode(parts[0]))
    number = 0
    while missing > 0:
        rule = rules[number % len(rules)]
        number += 1
        line = f"\nRule {number}. " + rule.format(firm=firm, days=3 + number % 26)
        parts.append(clip_tokens(tokenizer, line, missing))
        missing -= len(tokenizer.encode(parts[-1]))
    return "".join(parts)


def tool_result(tokens: int, tokenizer: ChatTokenizer, generator: random.Random) -> str:
    """What a tool returned, as JSON, cut to about `tokens` tokens."""
    records = [
        {
            "order": generator.randrange(100_000, 1_000_000),
            "item": generator.choice(GOODS),
            "state": generator.choice(STATES),
            "price": generator.randrange(500, 90_000) / 100,
        }
        for _ in range(1 + tokens // 20)
    ]
    text = f"Result of {generator.choice(TOOLS)}: {json.dumps(records)}"
    return clip_tokens(tokenizer, text, tokens)


def _session(
    index: int, policy: str, options: Options, tokenizer: ChatTokenizer, generator: random.Random
) -> Session:
    turns, result_tokens = options.shape("turns", 5), options.shape("user_tokens", 96)
    order = generator.randrange(100_000, 1_000_000)
    request = f"Customer: where is my order {order}, and can I still send it back?"
    later = [
        next_turn(tokenizer, policy, tool_result(result_tokens, tokenizer, generator))
        for _ in range(turns - 1)
    ]
    return Session(
        session=index,
        first_prompt=tuple(first_prompt(tokenizer, policy, request)),
        later_turns=tuple(map(tuple, later)),
        answer_tokens=drawn_lengths(options.shape("out_tokens", 48), turns, generator),
    )
