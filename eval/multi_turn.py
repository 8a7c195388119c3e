"""Workload `multi_turn`: chat sessions from real text that share system prompts.

With `sharing` 0 all sessions have one system prompt; with N, every N sessions in a row have one.
User turns are the dataset's; answers are what the server generates. A system prompt is made of long
answers found elsewhere in the same dataset, so it is real text too. Everything follows from the
seed. Session i runs on lane i modulo `concurrency`, its turns one after the other. Answer lengths
are drawn between half and one and a half times `out_tokens`, so that lanes do not fall into step;
they are the same in every arm.
"""

from __future__ import annotations

import random

from .chat import ChatTokenizer, clip_tokens, first_prompt, next_turn
from .config import EvalConfig
from .errors import DatasetError
from .sharegpt import Conversation, Dataset
from .workload import Session, Workload, sharing_degree

SYSTEM_OPENING = "You are a helpful assistant. Use these notes where they help.\n\n"


def build(config: EvalConfig, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Build the sessions.

    Raises:
        DatasetError: fewer than `conversations` records have `turns` user turns, or the records
            left over are too short for the system prompt.
    """
    generator = random.Random(config.seed)
    order = list(dataset.conversations)
    generator.shuffle(order)
    suitable = [entry for entry in order if len(entry.user_turns) >= config.turns]
    if len(suitable) < config.conversations:
        raise DatasetError(
            f"{dataset.name}: {len(suitable)} conversations have {config.turns} user turns, "
            f"{config.conversations} are needed. Lower --turns or --conversations"
        )
    chosen = suitable[: config.conversations]
    used = {id(entry) for entry in chosen}
    rest = [entry for entry in order if id(entry) not in used]
    degree = sharing_degree(config)
    groups = -(-config.conversations // degree)
    # Every group takes its text from other conversations: no two prompts begin alike by chance.
    systems = [system_prompt(rest[group::groups], config, tokenizer) for group in range(groups)]
    if groups > 1:
        systems = [f"Group {group + 1}. {text}" for group, text in enumerate(systems)]
    sessions = tuple(
        _session(index, entry, systems[index // degree], config, tokenizer, generator)
        for index, entry in enumerate(chosen)
    )
    prompts = [session.prompt_lengths() for session in sessions]
    return Workload(
        name="multi_turn",
        sessions=sessions,
        facts={
            "system_prompt_tokens": len(tokenizer.encode(systems[0])),
            "system_prompts": groups,
            "mean_first_prompt_tokens": round(sum(p[0] for p in prompts) / len(prompts), 1),
            "mean_last_prompt_tokens": round(sum(p[-1] for p in prompts) / len(prompts), 1),
        },
    )


def system_prompt(entries: list[Conversation], config: EvalConfig, tokenizer: ChatTokenizer) -> str:
    """About `system_tokens` tokens of real answers behind a fixed opening.

    Raises:
        DatasetError: the entries' answers together are shorter than that.
    """
    parts = [SYSTEM_OPENING]
    missing = config.system_tokens - len(tokenizer.encode(SYSTEM_OPENING))
    for entry in entries:
        if missing <= 0:
            return "".join(parts).rstrip()
        if not entry.assistant_turns:
            continue
        text = clip_tokens(tokenizer, max(entry.assistant_turns, key=len), missing) + "\n\n"
        parts.append(text)
        missing -= len(tokenizer.encode(text))
    if missing > 0:
        raise DatasetError(
            f"the conversations not used as sessions hold too little text for a system prompt of "
            f"{config.system_tokens} tokens ({missing} missing). Lower --system-tokens"
        )
    return "".join(parts).rstrip()


def _session(
    index: int,
    entry: Conversation,
    system: str,
    config: EvalConfig,
    tokenizer: ChatTokenizer,
    generator: random.Random,
) -> Session:
    shortest, longest = answer_range(config.out_tokens)
    turns = [
        clip_tokens(tokenizer, text, config.user_tokens)
        for text in entry.user_turns[: config.turns]
    ]
    return Session(
        session=index,
        lane=index % config.concurrency,
        first_prompt=tuple(first_prompt(tokenizer, system, turns[0])),
        later_turns=tuple(tuple(next_turn(tokenizer, system, text)) for text in turns[1:]),
        answer_tokens=tuple(generator.randint(shortest, longest) for _ in turns),
    )


def answer_range(out_tokens: int) -> tuple[int, int]:
    """Shortest and longest answer; their mean is `out_tokens`."""
    return out_tokens - out_tokens // 2, out_tokens + out_tokens // 2
