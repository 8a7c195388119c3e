"""Replay of a trace in Mooncake's format, scaled to the machine.

A line holds `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, one id per
block of 512 prompt tokens; equal ids mean equal blocks. Every id becomes fixed text, so requests
share exactly the prefixes that the trace says. `length_scale` shrinks blocks, prompts and answers
together (so sharing stays what it was), `time_scale` stretches the clock. Requests are sent at
their times, whether earlier ones have been answered or not (open loop).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vtoken_sglang_eval.chat import ChatTokenizer
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.sharegpt import Dataset

from .base import Session, Workload

BLOCK_TOKENS = 512
TEXT = (
    "the river carries sand from the hills to a wide and quiet delta where boats wait for wind "
    "while people mend nets count coins read letters bake bread and talk about rain prices roads "
    "old songs new laws distant cities machines that learn stars which fade and gardens that grow"
)
WORDS = tuple(TEXT.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One request of a trace, as it stands there: milliseconds and tokens, unscaled."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def parse_entry(record: Any, number: int) -> TraceEntry:
    """Check one decoded line.

    Raises:
        DatasetError: a field is missing or wrong, or the ids do not cover the prompt; names the
            line (counted from 1) and the field.
    """
    if not isinstance(record, dict):
        raise DatasetError(f"trace line {number}: must be an object")
    values = {}
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 1)):
        value = record.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < least:
            raise DatasetError(
                f"trace line {number}: {name} must be a number of at least {least}, got {value!r}"
            )
        values[name] = value
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise DatasetError(f"trace line {number}: hash_ids must be a list of whole numbers")
    blocks = -(-int(values["input_length"]) // BLOCK_TOKENS)
    if len(ids) < blocks:
        raise DatasetError(
            f"trace line {number}: hash_ids must hold an id per {BLOCK_TOKENS} prompt tokens "
            f"({blocks}), got {len(ids)}"
        )
    return TraceEntry(
        timestamp_ms=float(values["timestamp"]),
        input_length=int(values["input_length"]),
        output_length=int(values["output_length"]),
        hash_ids=tuple(ids[:blocks]),
    )


def parse_trace(records: Sequence[Any]) -> tuple[TraceEntry, ...]:
    """Every line of a trace, by time. Raises DatasetError (see `parse_entry`)."""
    entries = [parse_entry(record, number) for number, record in enumerate(records, start=1)]
    return tuple(sorted(entries, key=lambda entry: entry.timestamp_ms))


class BlockText:
    """Token ids of a trace's blocks: the same id gives the same `block_tokens` tokens."""

    def __init__(self, block_tokens: int, tokenizer: ChatTokenizer) -> None:
        self._tokens, self._tokenizer = block_tokens, tokenizer
        self._made: dict[int, tuple[int, ...]] = {}

    def of(self, hash_id: int) -> tuple[int, ...]:
        """The block's ids. It opens with its number, so that no two blocks begin alike."""
        if hash_id not in self._made:
            generator = random.Random(hash_id)
            ids: list[int] = self._tokenizer.encode(f"{generator.getrandbits(40):x} ")
            while len(ids) < self._tokens:
                words = generator.choices(WORDS, k=max(8, self._tokens - len(ids)))
                ids += self._tokenizer.encode(" " + " ".join(words))
            self._made[hash_id] = tuple(ids[: self._tokens])
        return self._made[hash_id]


def build(options: Options, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Build a session per request, of the first `conversations` if given."""
    entries = dataset.trace[: options.conversations or len(dataset.trace)]
    block_tokens = max(1, round(BLOCK_TOKENS * options.length_scale))
    blocks = BlockText(block_tokens, tokenizer)
    sessions = tuple(
        _session(index, entry, entries[0].timestamp_ms, blocks, options)
        for index, entry in enumerate(entries)
    )
    seen: set[int] = set()
    repeated = 0
    for entry in entries:
        repeated += sum(hash_id in seen for hash_id in entry.hash_ids)
        seen.update(entry.hash_ids)
    total = sum(len(entry.hash_ids) for entry in entries)
    return Workload(
        name=dataset.name,
        sessions=sessions,
        facts={
            "block_tokens": block_tokens,
            "blocks": total,
            "blocks_seen_before": repeated,
            "arrivals_end_s": round(max(s.arrival_s or 0.0 for s in sessions), 3),
        },
    )


def _session(
    index: int, entry: TraceEntry, first_ms: float, blocks: BlockText, options: Options
) -> Session:
    length = max(1, round(entry.input_length * options.length_scale))
    ids = [token for hash_id in entry.hash_ids for token in blocks.of(hash_id)]
    return Session(
        session=index,
        lane=index,
        first_prompt=tuple(ids[:length]),
        answer_tokens=(max(1, round(entry.output_length * options.length_scale)),),
        arrival_s=(entry.timestamp_ms - first_ms) / 1000 * options.time_scale,
    )
