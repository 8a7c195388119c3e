"""Chat prompts as token ids.

The client tokenises and the server receives ids. A later turn appends the very ids the server
generated, so that histories have the same length in every arm even where two arms answer
differently, and no re-tokenised answer breaks a prefix match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from .errors import ConfigError

Message = Mapping[str, str]
# Stands for an answer while a template is rendered; plain letters survive any template's trimming.
ANSWER_MARK = "VTOKENANSWERMARK"


class ChatTokenizer(Protocol):
    """What the workloads need from a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with no special token added."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`."""

    def render(self, messages: Sequence[Message]) -> str:
        """The chat template applied to `messages`, open for the assistant's answer."""


class ModelTokenizer:
    """The tokenizer and chat template that a model folder brings along."""

    def __init__(self, model_path: str) -> None:
        """Load from a local folder or a cached model name.

        Raises:
            ConfigError: nothing loadable there, or the tokenizer has no chat template.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            rule = f"must hold a tokenizer that transformers can load ({reason})"
            raise ConfigError("model", rule, model_path) from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError("model", "its tokenizer must have a chat template", model_path)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids)))

    def render(self, messages: Sequence[Message]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        )


def first_prompt(tokenizer: ChatTokenizer, system: str, user: str) -> list[int]:
    """Ids of the opening prompt: system message if any, first user turn, open answer."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    return tokenizer.encode(tokenizer.render(messages))


def next_turn(tokenizer: ChatTokenizer, system: str, user: str) -> list[int]:
    """Ids that follow an answer: its closing tokens, the next user turn, the next open answer.

    Raises:
        ConfigError: the chat template does not reproduce an earlier answer.
    """
    messages = [
        *([{"role": "system", "content": system}] if system else []),
        {"role": "user", "content": "."},
        {"role": "assistant", "content": ANSWER_MARK},
        {"role": "user", "content": user},
    ]
    _, mark, tail = tokenizer.render(messages).partition(ANSWER_MARK)
    if not mark:
        raise ConfigError("model", "its chat template must repeat earlier answers", "template")
    return tokenizer.encode(tail)


def clip_tokens(tokenizer: ChatTokenizer, text: str, limit: int) -> str:
    """`text` cut to about its first `limit` tokens (decoding may merge a token at the cut)."""
    # A token stands for at least one character in the tokenizers at hand, and long documents
    # are slow to encode whole: look only at a prefix that is surely long enough.
    token_ids = tokenizer.encode(text[: limit * 16])
    if len(token_ids) <= limit:
        return text[: limit * 16]
    return tokenizer.decode(token_ids[:limit])
