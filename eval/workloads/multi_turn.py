"""Workload `multi_turn`: chat sessions from real text that share system prompts.

With `sharing` 0 all sessions have one system prompt; with N, every N sessions in a row have one.
User turns are the dataset's; answers are what the server generates. A system prompt is made of long
answers found elsewhere in the same dataset, so it is real text too. Everything follows from the
seed; answer lengths are drawn around `out_tokens` and are the same in every arm.
"""

from __future__ import annotations

import random

from vtoken_sglang_eval.chat import ChatTokenizer, clip_tokens, first_prompt, next_turn
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.sharegpt import Conversation, Dataset

from .base import Session, Workload, drawn_lengths, mean

SYSTEM_OPENING = "You are a helpful assistant. Use these notes where they help.\n\n"


def build(options: Options, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Build the sessions.

    Raises:
        DatasetError: fewer than `conversations` records have `turns` user turns, or the records
            left over are too short for the system prompt.
    """
    generator = random.Random(options.seed)
    count, turns = options.shape("conversations", 24), options.shape("turns", 5)
    order = list(dataset.conversations)
    generator.shuffle(order)
    suitable = [entry for entry in order if len(entry.user_turns) >= turns]
    if len(suitable) < count:
        raise DatasetError(
            f"{dataset.name}: {len(suitable)} conversations have {turns} user turns, "
            f"{count} are needed. Lower --turns or --conversations"
        )
    chosen = suitable[:count]
    used = {id(entry) for entry in chosen}
    rest = [entry for entry in order if id(entry) not in used]
    degree = options.shape("sharing", 0) or count
    groups = -(-count // degree)
    # Every group takes its text from other conversations: no two prompts begin alike by chance.
    systems = [system_prompt(rest[group::groups], options, tokenizer) for group in range(groups)]
    if groups > 1:
        systems = [f"Group {group + 1}. {text}" for group, text in enumerate(systems)]
    sessions = tuple(
        _session(index, entry, systems[index // degree], turns, options, tokenizer, generator)
        for index, entry in enumerate(chosen)
    )
    prompts = [session.prompt_lengths() for session in sessions]
    return Workload(
        name="multi_turn",
        sessions=sessions,
        facts={
            "system_prompt_tokens": len(tokenizer.encode(systems[0])),
            "system_prompts": groups,
            "mean_first_prompt_tokens": mean([p[0] for p in prompts]),
            "mean_last_prompt_tokens": mean([p[-1] for p in prompts]),
        },
    )


def system_prompt(entries: list[Conversation], options: Options, tokenizer: ChatTokenizer) -> str:
    """About `system_tokens` tokens of real answers behind a fixed opening.

    Raises:
        DatasetError: the entries' answers together are shorter than that.
    """
    parts, wanted = [SYSTEM_OPENING], options.shape("system_tokens", 512)
    missing = wanted - len(tokenizer.encode(SYSTEM_OPENING))
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
            f"{wanted} tokens ({missing} missing). Lower --system-tokens"
        )
    return "".join(parts).rstrip()


def _session(
    index: int,
    entry: Conversation,
    system: str,
    turns: int,
    options: Options,
    tokenizer: ChatTokenizer,
    generator: random.Random,
) -> Session:
    limit = options.shape("user_tokens", 96)
    asked = [clip_tokens(tokenizer, text, limit) for text in entry.user_turns[:turns]]
    return Session(
        session=index,
        first_prompt=tuple(first_prompt(tokenizer, system, asked[0])),
        later_turns=tuple(tuple(next_turn(tokenizer, system, text)) for text in asked[1:]),
        answer_tokens=drawn_lengths(options.shape("out_tokens", 48), turns, generator),
    )
