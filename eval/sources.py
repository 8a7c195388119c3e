"""Read what a study replays or is made from: conversations, documents, a trace.

The format is told by the content: ShareGPT or OpenAI conversations, LongBench records (`context`,
`input`, `answers`), Mooncake's trace lines, or else free text. `hf:NAME[/CONFIG][:SPLIT]` reads a
data set by the `datasets` library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import DatasetError
from .options import Options
from .sharegpt import Dataset, decode_records, find_dataset, load_dataset, parse_conversation
from .workloads.documents import Document, documents_of_records
from .workloads.trace import parse_trace

BY_NAME = "hf:"
SAMPLES = Path(__file__).parent / "samples"
BY_SAMPLE = "sample:"
FORMATS = (
    'known formats: ShareGPT ({"conversations": [{"from", "value"}]}), OpenAI ({"messages": '
    '[{"role", "content"}]}), LongBench ({"context", "input", "answers"}), Mooncake trace '
    '({"timestamp", "input_length", "output_length", "hash_ids"}), and free text for '
    "--workload document_questions"
)


def load_source(options: Options) -> Dataset:
    """Read what the options name; without a name, the default conversations where any are needed.

    Raises:
        DatasetError: the file or data set is missing, or in no known format.
    """
    if options.trace:
        records, raw, dropped = _records(options.trace, "--trace")
        if not records:
            raise DatasetError(f"--trace {options.trace}: no JSON object a line in it")
        return _dataset(options.trace, raw, dropped=dropped, trace=parse_trace(records))
    if options.dataset:
        return read_dataset(options.dataset, free_text=options.workload == "document_questions")
    if options.workload in ("agent", "reasoning"):
        return _dataset("generated", b"")
    return load_dataset(find_dataset(None))


def read_dataset(name: str, free_text: bool = False) -> Dataset:
    """Conversations or documents of a file or a named data set.

    Args:
        free_text: whether a file without records is one long document.

    Raises:
        DatasetError: nothing there, or in no known format.
    """
    if name.startswith(BY_NAME):
        return _of_records(load_by_name(name.removeprefix(BY_NAME)), name, b"", 0)
    records, raw, dropped = _records(name, "--dataset")
    if records or not free_text:
        return _of_records(records, name, raw, dropped)
    text = raw.decode("utf-8", errors="replace")
    return _dataset(name, raw, documents=(Document(text=text),))


def _records(name: str, flag: str) -> tuple[list[Any], bytes, int]:
    """Records of a file, its bytes, and the characters behind the last whole record."""
    path = Path(name).expanduser()
    if name.startswith(BY_SAMPLE):
        path = SAMPLES / name.removeprefix(BY_SAMPLE)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{flag} {name}: {error.strerror}") from error
    text = raw.decode("utf-8", errors="replace")
    if text.lstrip("\ufeff \t\r\n")[:1] not in ("[", "{"):
        return [], raw, 0
    records, dropped = decode_records(text)
    return records, raw, dropped


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
        raise DatasetError(f"hf:{name} needs the package datasets: pip install datasets") from error
    try:
        return list(load_rows(path, config, split=split or "test"))
    except Exception as error:  # the library raises whatever its back ends do
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DatasetError(f"hf:{name} cannot be loaded ({first})") from error


def _of_records(records: Sequence[Any], name: str, raw: bytes, dropped: int) -> Dataset:
    documents = documents_of_records(records)
    if documents:
        return _dataset(name, raw, dropped=dropped, documents=documents)
    parsed = [parse_conversation(record) for record in records]
    usable = tuple(entry for entry in parsed if entry is not None)
    if usable:
        unusable = len(parsed) - len(usable)
        return _dataset(name, raw, dropped=dropped, conversations=usable, unusable=unusable)
    first = records[0] if records else None
    if isinstance(first, dict) and "hash_ids" in first:
        raise DatasetError(f"--dataset {name}: this is a trace; pass it with --trace")
    raise DatasetError(f"--dataset {name}: in no known format; {FORMATS}")


def _dataset(name: str, raw: bytes, dropped: int = 0, **fields: Any) -> Dataset:
    return Dataset(
        **{"conversations": (), "unusable": 0, **fields},
        dropped_chars=dropped,
        name=Path(name).name,
        size_bytes=len(raw),
        sha256=hashlib.sha256(raw).hexdigest() if raw else "",
    )
