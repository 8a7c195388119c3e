"""The oracle of eviction: transformers with exactly the traced (query, key) pairs masked out.

A server with `--vtoken-trace FILE` writes one JSON line per eviction. The functions here read it
and compute, in one forward pass over prompt and answer, what greedy decoding gives when every
query at or after an eviction's logical length no longer sees the positions it evicted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.reference import Continuation, Evictions, Reference, visible_keys


@dataclass(frozen=True, slots=True)
class Eviction:
    """One line of the trace: `evicted` positions died when the request had `logical_len` tokens."""

    logical_len: int
    evicted: tuple[int, ...]


Trace = dict[str, list[Eviction]]
"""Evictions by request id, in the order in which they happened."""


def read_trace(path: Path) -> Trace:
    """Every eviction in a trace file. Raises ValueError or KeyError on a line of another form."""
    trace: Trace = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        eviction = Eviction(int(record["logical_len"]), tuple(map(int, record["evicted"])))
        trace.setdefault(record["rid"], []).append(eviction)
    return trace


def evictions_of(evictions: Sequence[Eviction]) -> Evictions:
    """The evictions of one request that was never retracted, as evictions by query position.

    Raises ValueError when a position is evicted twice or the lengths do not ascend: then the trace
    is not of one undisturbed run.
    """
    by_query: dict[int, tuple[int, ...]] = {}
    dead: set[int] = set()
    for eviction in evictions:
        if by_query and eviction.logical_len <= max(by_query):
            raise ValueError(f"evictions out of order at length {eviction.logical_len}")
        if again := dead.intersection(eviction.evicted):
            raise ValueError(f"positions evicted twice: {sorted(again)}")
        by_query[eviction.logical_len] = eviction.evicted
        dead.update(eviction.evicted)
    return by_query


def masked_continuation(
    reference: Reference, prompt: Sequence[int], tokens: Sequence[int], evictions: Evictions
) -> Continuation:
    """What greedy decoding picks at each step of `tokens` after `prompt` under `evictions`.

    Step i is computed after tokens[:i], whatever those are, so `tokens` is the greedy answer
    exactly when it equals the returned tokens. Evictions that no query of the pass comes after are
    left out, since they change nothing.
    """
    ids = [*prompt, *tokens[:-1]]
    acting = {query: evicted for query, evicted in evictions.items() if query < len(ids)}
    rows = reference.forward(ids, visible_keys(len(ids), acting))[len(prompt) - 1 :]
    best = rows.topk(2, dim=-1)
    gaps = best.values[:, 0] - best.values[:, 1]
    return Continuation(best.indices[:, 0].tolist(), best.values[:, 0].tolist(), gaps.tolist())
