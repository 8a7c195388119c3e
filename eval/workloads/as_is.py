"""A data set replayed as it is: its turns, its lengths, its order, the prefixes it shares.

A conversation is a session: each user message is sent behind everything before it, and an answer
is made as long as the one in the data. A record with a context and questions is a session per
question, the context first, so that questions about one text share it. Shapes that are given
(`--turns`, `--user-tokens`, `--out-tokens`, `--conversations`) only cut.
"""

from __future__ import annotations

from vtoken_sglang_eval.chat import ChatTokenizer, clip_tokens, first_prompt, next_turn
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.sharegpt import Conversation, Dataset

from .base import Session, Workload, mean
from .documents import Document

ANSWER_TOKENS = 64  # where the data tell no length
LONGER = 8  # room for a model that says a few words around a short answer


def build(options: Options, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Sessions in the order of the data.

    Raises:
        DatasetError: no conversation with a user's turn.
    """
    sessions: list[Session] = []
    for document in dataset.documents:
        sessions += _about(document, options, tokenizer, len(sessions))
    for entry in dataset.conversations:
        if options.conversations and len(sessions) >= options.conversations:
            break
        session = _session(entry, options, tokenizer, len(sessions))
        sessions += [session] if session else []
    sessions = sessions[: options.conversations or len(sessions)]
    if not sessions:
        raise DatasetError(f"{dataset.name}: no conversation in it")
    answers = [length for session in sessions for length in session.answer_tokens]
    return Workload(
        name=dataset.name,
        sessions=tuple(sessions),
        facts={
            "mean_turns": mean([session.turns for session in sessions]),
            "mean_first_prompt_tokens": mean([len(session.first_prompt) for session in sessions]),
            "mean_answer_tokens": mean(answers),
        },
    )


def _exchanges(entry: Conversation) -> tuple[str, list[list[str]]]:
    """The system text, and [user text, answer or ""] per turn; several messages of one side in a
    row are one."""
    system = ""
    turns: list[list[str]] = []
    for role, text in entry.messages:
        if role == "system":
            system = f"{system}\n\n{text}".strip()
        elif role == "user" and (not turns or turns[-1][1]):
            turns.append([text, ""])
        elif turns:  # an answer before any question cannot be asked for
            place = 0 if role == "user" else 1
            turns[-1][place] = f"{turns[-1][place]}\n\n{text}".strip()
    return system, turns


def _session(
    entry: Conversation, options: Options, tokenizer: ChatTokenizer, number: int
) -> Session | None:
    system, turns = _exchanges(entry)
    turns = turns[: options.turns or len(turns)]
    if not turns:
        return None
    asked = [_clip(text, options, tokenizer) for text, _ in turns]
    lengths = [
        options.out_tokens or len(tokenizer.encode(answer)) or entry.max_tokens or ANSWER_TOKENS
        for _, answer in turns
    ]
    return Session(
        session=number,
        first_prompt=tuple(first_prompt(tokenizer, system, asked[0])),
        later_turns=tuple(tuple(next_turn(tokenizer, system, text)) for text in asked[1:]),
        answer_tokens=tuple(lengths),
    )


def _about(
    document: Document, options: Options, tokenizer: ChatTokenizer, number: int
) -> list[Session]:
    found: list[Session] = []
    for question in document.questions:
        text = f"{document.text}\n\n{question.text}"
        known = [len(tokenizer.encode(answer)) + LONGER for answer in question.answers]
        found.append(
            Session(
                session=number + len(found),
                first_prompt=tuple(first_prompt(tokenizer, "", text)),
                answer_tokens=(options.out_tokens or max(known, default=ANSWER_TOKENS),),
                expected=(question.answers,) if question.answers else (),
            )
        )
    return found


def _clip(text: str, options: Options, tokenizer: ChatTokenizer) -> str:
    return clip_tokens(tokenizer, text, options.user_tokens) if options.user_tokens else text
