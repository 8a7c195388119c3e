"""Where a workload's text comes from: a file the user names, a data set by name, or the default.

`sample:NAME` is one of the small files that ship with the package. What a file is follows from its
content, not its name: ShareGPT conversations, LongBench-format documents with questions, a Mooncake
trace; anything that is not JSON is one long free text. Workloads that make their own text read
nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .config import EvalConfig
from .documents import Document, documents_of_records
from .errors import DatasetError
from .mooncake import parse_trace
from .sharegpt import Dataset, decode_records, find_dataset, load_dataset, parse_conversation

GENERATED = Dataset(
    conversations=(), unusable=0, dropped_chars=0, name="generated", size_bytes=0, sha256=""
)
NEEDS = {
    "multi_turn": "conversations",
    "document_questions": "documents",
    "mooncake": "trace",
    "agent": "",
    "reasoning": "",
    "generated_shared_prefix": "",
}
BY_NAME = "hf:"
SAMPLES = Path(__file__).parent / "samples"
BY_SAMPLE = "sample:"


def load_source(config: EvalConfig) -> Dataset:
    """Read what the configured workload needs.

    Raises:
        DatasetError: the file or data set is missing or holds nothing of the kind.
    """
    need = NEEDS.get(config.workload, "conversations")
    if not need:
        return GENERATED
    if config.dataset is not None and config.dataset.startswith(BY_NAME):
        return _of_records(load_by_name(config.dataset[len(BY_NAME) :]), config.dataset, b"", need)
    if config.dataset is None:
        if need == "trace":
            raise DatasetError("workload mooncake replays a trace: pass --dataset PATH with one")
        return load_dataset(find_dataset(None))
    path = Path(config.dataset).expanduser()
    if config.dataset.startswith(BY_SAMPLE):
        path = SAMPLES / config.dataset[len(BY_SAMPLE) :]
    elif need == "conversations":
        path = find_dataset(config.dataset)
    if need == "conversations" and path.is_file():
        return load_dataset(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"--dataset {config.dataset}: {error.strerror}") from error
    text = raw.decode("utf-8", errors="replace")
    if text.lstrip("\ufeff \t\r\n")[:1] in ("[", "{"):
        records, dropped = decode_records(text)
        if records:
            return _of_records(records, path.name, raw, need, dropped)
    if need == "trace":
        raise DatasetError(f"{path}: not a Mooncake trace (one JSON object a line)")
    return _dataset(path.name, raw, documents=(Document(text=text),))


def load_by_name(name: str) -> list[Any]:
    """Rows of `NAME[/CONFIG][:SPLIT]` (split "test" if not given) through the `datasets` library.

    `NAME` may hold one slash (an owner); a further one separates the configuration.

    Raises:
        DatasetError: the library is missing, or the data set cannot be reached.
    """
    name, _, split = name.partition(":")
    parts = name.split("/")
    path, config = "/".join(parts[:2]), "/".join(parts[2:]) or None
    try:
        from datasets import load_dataset as load_rows
    except ImportError as error:
        raise DatasetError(f"hf:{name} needs the package datasets; install it") from error
    try:
        return list(load_rows(path, config, split=split or "test"))
    except Exception as error:  # the library raises whatever its back ends do
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DatasetError(f"hf:{name} cannot be loaded ({first})") from error


def _of_records(
    records: Sequence[Any], name: str, raw: bytes, need: str, dropped: int = 0
) -> Dataset:
    if need == "trace":
        if not records:
            raise DatasetError(f"{name}: an empty trace")
        return _dataset(name, raw, dropped=dropped, trace=parse_trace(records))
    documents = documents_of_records(records) if need == "documents" else ()
    if documents:
        return _dataset(name, raw, dropped=dropped, documents=documents)
    parsed = [parse_conversation(record) for record in records]
    usable = tuple(entry for entry in parsed if entry is not None)
    if not usable:
        raise DatasetError(f"{name}: neither documents with questions nor conversations in it")
    return _dataset(
        name, raw, dropped=dropped, conversations=usable, unusable=len(parsed) - len(usable)
    )


def _dataset(name: str, raw: bytes, dropped: int = 0, **fields: Any) -> Dataset:
    return Dataset(
        **{"conversations": (), "unusable": 0, **fields},
        dropped_chars=dropped,
        name=name,
        size_bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest() if raw else "",
    )
