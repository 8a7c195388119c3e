"""Which queries of a forward count for which scores: host integers only.

A request that is watched has one score row, or two for a history window, whose blocks take turns.
Queries are named by their position, so what is observed does not depend on how the prompt was cut
into chunks or which requests were batched (except for the end of the prompt, which is its last
chunk's business by definition).
"""

from __future__ import annotations

from dataclasses import dataclass

from vtoken_sglang.engine.request_state import Watched
from vtoken_sglang.policy.base import Gather, Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Queries of one forward that go to one score row.

    Fields:
        queries: positions; may be empty when only `clear` matters.
        score_row: row of the score table.
        clear: zero the row first.
        below_uniform: count weights below an equal share instead of adding weights.
    """

    queries: range
    score_row: int
    clear: bool = False
    below_uniform: bool = False


def rows_needed(observation: Observation) -> int:
    """Score rows of a request with this observation."""
    return 2 if observation.gather is Gather.BELOW_UNIFORM else 1


def take_shares(
    watched: Watched, start: int, end: int, *, prompt_ends: bool, every: int
) -> list[Share]:
    """What the queries [start, end) of a forward add, noted in `watched`.

    Args:
        prompt_ends: the forward computes the prompt's last chunk.
        every: queries at multiples of it are observed (all of them at the end of the prompt).
    """
    gather, window = watched.observation.gather, watched.observation.window
    if gather is Gather.PROMPT_END:
        if not prompt_ends or watched.prompt_ended:
            return []
        first = max(start, end - window)
        watched.prompt_ended, watched.observed_len = True, first
        return [Share(queries=range(first, end), score_row=watched.score_rows[0])]
    queries = range(-(-start // every) * every, end, every)
    if not queries:
        return []
    watched.observed_len = queries[-1] + 1
    if gather is Gather.TOTAL:
        return [Share(queries=queries, score_row=watched.score_rows[0])]
    if gather is Gather.LAST:
        return [Share(queries=queries[-1:], score_row=watched.score_rows[0], clear=True)]
    return _history(watched, queries, window)


def _history(watched: Watched, queries: range, window: int) -> list[Share]:
    newest = queries[-1] // window
    shares = []
    for block in range(max(0, newest - 1), newest + 1):
        inside = range(
            _first_at_least(queries, block * window),
            min(queries.stop, (block + 1) * window),
            queries.step,
        )
        clear = block > watched.block
        if inside or clear:
            row = watched.score_rows[block % 2]
            shares.append(Share(queries=inside, score_row=row, clear=clear, below_uniform=True))
    watched.block = newest
    return shares


def _first_at_least(queries: range, pos: int) -> int:
    if pos <= queries.start:
        return queries.start
    return queries.start + -(-(pos - queries.start) // queries.step) * queries.step
