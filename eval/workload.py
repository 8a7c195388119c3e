"""What a workload is: sessions of token ids, all fixed before the first request is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from .chat import ChatTokenizer
from .config import EvalConfig
from .errors import ConfigError
from .sharegpt import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One conversation: its turns are sent one after the other by one lane.

    Fields:
        session: index in the workload, also its place in the arrival order.
        lane: which of the `concurrency` closed loops runs it.
        first_prompt: token ids of the opening prompt.
        later_turns: per further turn, the token ids appended after the previous answer.
        answer_tokens: exact length of every answer, one per turn.
        arrival_s: when its first turn is sent, in seconds after the run began, whatever the other
            sessions do (open loop); None: after the lane's previous session (closed loop).
        expected: per turn, texts of which the answer should contain one; empty: not scored.
    """

    session: int
    lane: int
    first_prompt: tuple[int, ...]
    later_turns: tuple[tuple[int, ...], ...]
    answer_tokens: tuple[int, ...]
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
class BenchPlan:
    """What SGLang's serving benchmark is asked to send. Lengths in tokens."""

    groups: int
    prompts_per_group: int
    prefix_tokens: int
    question_tokens: int
    answer_tokens: int
    concurrency: int
    seed: int
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sessions and the facts about them that the report shows.

    Fields:
        bench: SGLang's benchmark is the client; sessions then only stand for its requests. None:
            this package's client sends the sessions.
    """

    name: str
    sessions: tuple[Session, ...]
    facts: dict[str, int | float | str] = field(default_factory=dict)
    bench: BenchPlan | None = None

    @property
    def requests(self) -> int:
        return sum(session.turns for session in self.sessions)

    @property
    def lanes(self) -> int:
        return 1 + max(session.lane for session in self.sessions)

    def longest(self) -> int:
        """Tokens of the longest session, its last answer included."""
        return max(session.total_tokens() for session in self.sessions)

    def output_tokens(self) -> int:
        """Tokens of all answers together."""
        return sum(sum(session.answer_tokens) for session in self.sessions)

    def new_prompt_tokens(self) -> int:
        """Prompt tokens that no earlier request of the same session had (upper bound of prefill
        when every earlier turn is still cached; sharing between sessions not counted)."""
        return sum(
            len(session.first_prompt) + sum(len(turn) for turn in session.later_turns)
            for session in self.sessions
        )

    def fingerprint(self) -> str:
        """sha256 over every token id, answer length and lane: equal means the same requests."""
        digest = hashlib.sha256(self.name.encode())
        for session in self.sessions:
            parts = (session.lane, session.first_prompt, session.later_turns, session.answer_tokens)
            digest.update(repr(parts).encode())
            if session.arrival_s is not None:
                digest.update(repr(session.arrival_s).encode())
            if session.expected:
                digest.update(repr(session.expected).encode())
        return digest.hexdigest()


WorkloadBuilder = Callable[[EvalConfig, Dataset, ChatTokenizer], Workload]


def workload_builders() -> dict[str, WorkloadBuilder]:
    """The workloads by name. A new one is a file of its own and a line here."""
    from . import (
        agent,
        document_questions,
        generated_shared_prefix,
        mooncake,
        multi_turn,
        reasoning,
    )

    return {
        "multi_turn": multi_turn.build,
        "document_questions": document_questions.build,
        "agent": agent.build,
        "mooncake": mooncake.build,
        "generated_shared_prefix": generated_shared_prefix.build,
        "reasoning": reasoning.build,
    }


def sharing_degree(config: EvalConfig) -> int:
    """How many sessions in a row share a prefix."""
    return config.sharing or config.conversations


def build_workload(config: EvalConfig, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Build the configured workload and check that its longest session fits the pool.

    Raises:
        ConfigError: unknown workload name, or a session longer than the pool.
        DatasetError: the dataset holds too few suitable conversations.
    """
    builders = workload_builders()
    if config.workload not in builders:
        raise ConfigError("workload", f"must be among {', '.join(builders)}", config.workload)
    workload = builders[config.workload](config, dataset, tokenizer)
    needed = workload.longest() + config.page_size
    if needed > config.pool:
        raise ConfigError("pool", f"must hold the longest session ({needed} tokens)", config.pool)
    return workload
