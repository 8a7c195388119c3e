"""Workload `document_questions`: one long document, many questions, each a request of its own.

`sharing` requests ask about the same document (0: all of them), so the document is the shared
prefix and `system_tokens` its length. With more than one turn, a session goes on asking about its
document. Questions with known answers are scored by exact recall (see `documents`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from .chat import ChatTokenizer, first_prompt, next_turn
from .config import EvalConfig
from .documents import Document, conversation_texts, cut_documents, plant_facts
from .errors import DatasetError
from .sharegpt import Dataset
from .workload import Session, Workload, sharing_degree

OPENING = "Read this document, then answer questions about it.\n\n"


def build(config: EvalConfig, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Build one session per `conversations`.

    Raises:
        DatasetError: too little text, or too few questions about a document.
    """
    generator = random.Random(config.seed)
    degree = sharing_degree(config)
    count = -(-config.conversations // degree)
    asked = min(degree, config.conversations) * config.turns
    documents = _documents(config, dataset, tokenizer, generator, count, asked)
    sessions = tuple(
        _session(index, documents[index // degree], index % degree, config, tokenizer)
        for index in range(config.conversations)
    )
    lengths = [len(tokenizer.encode(document.text)) for document in documents]
    return Workload(
        name="document_questions",
        sessions=sessions,
        facts={
            "documents": count,
            "sharing_degree": degree,
            "mean_document_tokens": round(sum(lengths) / len(lengths), 1),
        },
    )


def _documents(
    config: EvalConfig,
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
        return [_clipped(document, config, tokenizer) for document in fitting[:count]]
    texts: Iterator[str] = iter([document.text for document in dataset.documents])
    if not dataset.documents:
        order = list(dataset.conversations)
        generator.shuffle(order)
        texts = conversation_texts(order)
    cut = cut_documents(texts, count, config.system_tokens, tokenizer)
    return [plant_facts(text, asked, generator) for text in cut]


def _clipped(document: Document, config: EvalConfig, tokenizer: ChatTokenizer) -> Document:
    """The document cut in its middle, where benchmarks of long contexts cut it, too."""
    ids = tokenizer.encode(document.text)
    if len(ids) <= config.system_tokens:
        return document
    half = config.system_tokens // 2
    kept = tokenizer.decode(ids[:half]) + tokenizer.decode(ids[half - config.system_tokens :])
    return Document(text=kept, questions=document.questions)


def _session(
    index: int, document: Document, place: int, config: EvalConfig, tokenizer: ChatTokenizer
) -> Session:
    """Session `index`, the `place`-th about its document."""
    asked = document.questions[place * config.turns : (place + 1) * config.turns]
    system = OPENING + document.text
    return Session(
        session=index,
        lane=index % config.concurrency,
        first_prompt=tuple(first_prompt(tokenizer, system, asked[0].text)),
        later_turns=tuple(tuple(next_turn(tokenizer, system, q.text)) for q in asked[1:]),
        answer_tokens=(config.out_tokens,) * config.turns,
        expected=tuple(question.answers for question in asked),
    )
