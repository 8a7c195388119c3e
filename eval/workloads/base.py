"""Sessions of token ids, and the small pieces that several workloads need."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vtoken_sglang_eval.errors import ConfigError, DatasetError


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One conversation: its turns are sent one after the other by one lane.

    Fields:
        session: index in the workload, also its place in the arrival order.
        lane: which of the closed loops runs it.
        first_prompt: token ids of the opening prompt.
        later_turns: per further turn, the token ids appended after the previous answer.
        answer_tokens: exact length of every answer, one per turn.
        arrival_s: when its first turn is sent, in seconds after the run began, whatever the other
            sessions do (open loop); None: after the lane's previous session (closed loop).
        expected: per turn, texts of which the answer should contain one; empty: not scored.
    """

    session: int
    first_prompt: tuple[int, ...]
    later_turns: tuple[tuple[int, ...], ...] = ()
    answer_tokens: tuple[int, ...]
    lane: int = 0
    arrival_s: float | None = None
    expected: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.answer_tokens) != self.turns:
            rule = f"must have one length per turn ({self.turns})"
            raise ConfigError("answer_tokens", rule, len(self.answer_tokens))
        if self.expected and len(self.expected) != self.turns:
            raise ConfigError("expected", f"must have one entry per turn ({self.turns})", "less")

    @property
    def turns(self) -> int:
        return 1 + len(self.later_turns)

    def prompt_lengths(self) -> list[int]:
        """Prompt length of every turn."""
        lengths = [len(self.first_prompt)]
        for answer, turn in zip(self.answer_tokens, self.later_turns, strict=False):
            lengths.append(lengths[-1] + answer + len(turn))
        return lengths

    def total_tokens(self) -> int:
        """Logical length of the session when its last answer is complete."""
        return self.prompt_lengths()[-1] + self.answer_tokens[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sessions, and the facts about them that the report shows."""

    name: str
    sessions: tuple[Session, ...]
    facts: dict[str, int | float | str] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(session.turns for session in self.sessions)

    @property
    def lanes(self) -> int:
        return 1 + max(session.lane for session in self.sessions)

    @property
    def timed(self) -> bool:
        """Whether the sessions come at times of their own."""
        return self.sessions[0].arrival_s is not None

    def longest(self) -> int:
        """Tokens of the longest session, its last answer included."""
        return max(session.total_tokens() for session in self.sessions)

    def output_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(sum(session.answer_tokens) for session in self.sessions)

    def over(self, lanes: int) -> Workload:
        """The same sessions on so many closed loops; 0: all at once. A timed one stays as it is."""
        if self.timed:
            return self
        count = lanes or len(self.sessions)
        placed = tuple(replace(s, lane=at % count) for at, s in enumerate(self.sessions))
        return replace(self, sessions=placed)

    def that_fits(self, limit: int) -> Workload:
        """Without the sessions of more than `limit` tokens; says how many those were.

        Raises:
            DatasetError: none fits.
        """
        kept = [session for session in self.sessions if session.total_tokens() <= limit]
        if not kept:
            raise DatasetError(
                f"{self.name}: every session is longer than the server takes ({limit} tokens). "
                "Raise --pool, or shorten with --turns, --length-scale or --system-tokens"
            )
        if len(kept) == len(self.sessions):
            return self
        gone = len(self.sessions) - len(kept)
        renumbered = tuple(
            replace(s, session=at, lane=at if self.timed else s.lane) for at, s in enumerate(kept)
        )
        facts = {**self.facts, f"left_out_longer_than_{limit}": gone}
        return replace(self, sessions=renumbered, facts=facts)

    def fingerprint(self) -> str:
        """sha256 over every token id, answer length and time: equal means the same requests."""
        digest = hashlib.sha256(self.name.encode())
        for one in self.sessions:
            parts = (one.first_prompt, one.later_turns, one.answer_tokens, one.arrival_s)
            digest.update(repr((*parts, one.expected)).encode())
        return digest.hexdigest()


def drawn_lengths(mean: int, turns: int, generator: random.Random) -> tuple[int, ...]:
    """Answer lengths between half and one and a half times the mean, so that lanes do not fall
    into step."""
    half = mean // 2
    return tuple(generator.randint(mean - half, mean + half) for _ in range(turns))


def mean(values: Sequence[int]) -> float:
    """Mean with one digit, for the facts of a workload."""
    return round(sum(values) / len(values), 1)
