"""From options and data to sessions."""

from __future__ import annotations

from vtoken_sglang_eval.chat import ChatTokenizer
from vtoken_sglang_eval.errors import DatasetError
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.sharegpt import Dataset

from . import agent, as_is, document_questions, multi_turn, reasoning, trace
from .base import Workload

BUILDERS = {
    "multi_turn": multi_turn.build,
    "document_questions": document_questions.build,
    "agent": agent.build,
    "reasoning": reasoning.build,
}


def build_workload(options: Options, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """The sessions that the options ask for.

    Raises:
        DatasetError: the data hold too little.
    """
    if dataset.trace:
        return trace.build(options, dataset, tokenizer)
    if options.replayed:
        if not dataset.conversations and not dataset.documents:
            raise DatasetError(f"{dataset.name}: nothing in it can be replayed")
        return as_is.build(options, dataset, tokenizer)
    return BUILDERS[options.workload or "multi_turn"](options, dataset, tokenizer)
