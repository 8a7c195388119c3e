"""Workload `document_questions`: one long document, many questions, each a request of its own.

`sharing` requests ask about the same document (0: all of them), so the document is the shared
prefix and `system_tokens` its length. With more than one turn, a session goes on asking about its
document. Questions with known answers are scored by exact recall (see `documents`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from vtoken_sglang_eval.chat import ChatTokenizer, first_prompt, next_turn
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.sharegpt import Dataset

from .base import Session, Workload, mean
from .documents import Document, conversation_texts, cut_documents, plant_facts

OPENING = "Read this document, then answer questions about it.\n\n"


def build(options: Options, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Build one session per `conversations`.

    Raises:
        DatasetError: too little text, or too few questions about a document.
    """
    generator = random.Random(options.seed)
    wanted, turns = options.shape("conversations", 24), options.shape("turns", 1)
    degree = options.shape("sharing", 0) or wanted
    count = -(-wanted // degree)
    asked = min(degree, wanted) * turns
    documents = _documents(options, dataset, tokenizer, generator, count, asked)
    sessions = tuple(
        _session(index, documents[index // degree], index % degree, turns, options, tokenizer)
        for index in range(wanted)
    )
    lengths = [len(tokenizer.encode(document.text)) for document in documents]
    return Workload(
        name="document_questions",
        sessions=sessions,
        facts={
            "documents": count,
            "sharing_degree": degree,
            "mean_document_tokens": mean(lengths),
        },
    )


def _documents(
    options: Options,
    dataset: Dataset,
    tokenizer: ChatTokenizer,
    generator: random.Random,
    count: int,
    asked: int,
) -> list[Document]:
    """`count` documents with at least `asked` questions each."""
    with_questions = [d for d in dataset.documents if d.questions]
    if with_questions:
        fitting = [d for d in with_questions if len(d.questions) >= asked]
        if len(fitting) < count:
            raise DatasetError(
                f"{dataset.name}: {len(fitting)} documents have {asked} questions, {count} are "
                "needed. Lower --sharing, --turns or --conversations"
            )
        return [_clipped(document, options, tokenizer) for document in fitting[:count]]
    texts: Iterator[str] = iter([document.text for document in dataset.documents])
    if not dataset.documents:
        order = list(dataset.conversations)
        generator.shuffle(order)
        texts = conversation_texts(order)
    cut = cut_documents(texts, count, options.shape("system_tokens", 512), tokenizer)
    return [plant_facts(text, asked, generator) for text in cut]


def _clipped(document: Document, options: Options, tokenizer: ChatTokenizer) -> Document:
    """The document cut in its middle, where benchmarks of long contexts cut it, too."""
    ids = tokenizer.encode(document.text)
    limit = options.shape("system_tokens", 512)
    if len(ids) <= limit:
        return document
    half = limit // 2
    kept = tokenizer.decode(ids[:half]) + tokenizer.decode(ids[half - limit :])
    return Document(text=kept, questions=document.questions)


def _session(
    index: int,
    document: Document,
    place: int,
    turns: int,
    options: Options,
    tokenizer: ChatTokenizer,
) -> Session:
    """Session `index`, the `place`-th about its document."""
    asked = document.questions[place * turns : (place + 1) * turns]
    system = OPENING + document.text
    return Session(
        session=index,
        first_prompt=tuple(first_prompt(tokenizer, system, asked[0].text)),
        later_turns=tuple(tuple(next_turn(tokenizer, system, q.text)) for q in asked[1:]),
        answer_tokens=(options.shape("out_tokens", 48),) * turns,
        expected=tuple(question.answers for question in asked),
    )
