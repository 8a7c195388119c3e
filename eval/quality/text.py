"""Real text to measure on: ShareGPT conversations, read at run time and never stored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from zlib import crc32

import numpy as np
from vtoken_sglang_eval.chat import ChatTokenizer
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.sharegpt import Conversation, Dataset

# A token is at most this many characters in ordinary text: shorter texts are not worth encoding.
MIN_CHARACTERS_PER_TOKEN = 3
MAX_CHARACTERS_PER_TOKEN = 16
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_SENTENCE_WORDS = range(5, 40)


def conversation_text(conversation: Conversation, tokenizer: ChatTokenizer) -> str:
    """The whole conversation as the model's chat template writes it."""
    messages = []
    for user, assistant in zip(conversation.user_turns, conversation.assistant_turns, strict=False):
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ]
    return str(tokenizer.render(messages))


def _shuffled(dataset: Dataset, seed: str) -> Iterator[Conversation]:
    random = np.random.default_rng(crc32(seed.encode()))
    for at in random.permutation(len(dataset.conversations)).tolist():
        yield dataset.conversations[at]


def passages(
    dataset: Dataset, tokenizer: ChatTokenizer, count: int, length: int, seed: int
) -> list[list[int]]:
    """Ids of the first `length` tokens of `count` different conversations of at least two turns.

    Raises:
        DatasetError: fewer conversations are long enough.
    """
    found: list[list[int]] = []
    for conversation in _shuffled(dataset, str(seed)):
        texts = (*conversation.user_turns, *conversation.assistant_turns)
        if len(conversation.assistant_turns) < 2:
            continue
        if sum(map(len, texts)) < MIN_CHARACTERS_PER_TOKEN * length:
            continue
        text = conversation_text(conversation, tokenizer)
        token_ids = tokenizer.encode(text[: MAX_CHARACTERS_PER_TOKEN * length])
        if len(token_ids) >= length:
            found.append(token_ids[:length])
        if len(found) == count:
            return found
    raise DatasetError(f"{dataset.name}: fewer than {count} conversations have {length} tokens")


def sentences(dataset: Dataset, seed: str) -> Iterator[str]:
    """English-looking sentences of assistants' answers; the seed draws the order of conversations.

    Sentences with digits are left out: an answer that is a number must stand in one place only.
    """
    for conversation in _shuffled(dataset, seed):
        for turn in conversation.assistant_turns:
            for sentence in _SENTENCE_END.split(turn):
                flat = " ".join(sentence.split())
                plain = flat.isascii() and not any(map(str.isdigit, flat))
                if (
                    plain
                    and flat.endswith((".", "!", "?"))
                    and len(flat.split()) in _SENTENCE_WORDS
                ):
                    yield flat


def filler(
    source: Iterator[str], tokenizer: ChatTokenizer, tokens: int
) -> tuple[list[str], list[int]]:
    """The next sentences of `source`, at most `tokens` tokens in all, and the length of each.

    Raises:
        DatasetError: `source` ends before that.
    """
    texts: list[str] = []
    lengths: list[int] = []
    total = 0
    for sentence in source:
        size = len(tokenizer.encode(" " + sentence))
        if total + size > tokens:
            return texts, lengths
        texts.append(sentence)
        lengths.append(size)
        total += size
    raise DatasetError(f"the text ended after {total} of {tokens} tokens")
