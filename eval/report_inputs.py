"""What `eval report` may be given: run folders, a grid's folder, result files, figures files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .cells import MANIFEST, CellStore
from .errors import ResultsError
from .results import read_result

ROW = ("study", "arm", "repeats", "repeats_planned", "failed", "figures", "ratios")


def read_inputs(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Result documents and figures documents, each in the order given.

    Raises:
        ResultsError: a path is none of these, or a grid has no finished cell yet.
    """
    results: list[dict[str, Any]] = []
    figures: list[dict[str, Any]] = []
    for path in paths:
        if (path / MANIFEST).is_file():
            found = CellStore(path).results()
            if not found:
                raise ResultsError(f"{path}: no cell of this grid has been measured yet")
            results += found
            continue
        document = _figures_document(path)
        if document is not None:
            _check_rows(path, document)
            figures.append(document)
        else:
            results.append(read_result(path))
    return results, figures


def _check_rows(path: Path, document: Mapping[str, Any]) -> None:
    """Raise ResultsError if the rows of a table lack what every row has."""
    for number, row in enumerate(document.get("rows", ())):
        lacks = [name for name in ROW if name not in row]
        if lacks:
            raise ResultsError(f"{path}: row {number} has no {', '.join(lacks)}")


def _figures_document(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(document, dict) and "topic" in document and "figures" in document
    return document if known else None
