"""Figures files `docs/results/<topic>.json`: measured numbers that README and docs quote.

    {"topic", "command", "commit", "device", "versions", "settings", "repeats",
     "figures": {name: {"value", "unit", "spread"}}}

Several commands may measure figures of one topic. The provenance at the top is the one most of
the figures share; a figure measured otherwise carries its own values of the fields that differ.
`provenance_of` puts the two together. A figure from a smaller measurement (fewer repeats, or
fewer requests in each) does not replace one from a larger.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import FiguresError
from .results import rounded

PROVENANCE = ("command", "commit", "device", "versions", "settings", "repeats")
FIGURE_FIELDS = ("value", "unit", "spread")
# Settings that say how much was measured; a figure that lacks one is not compared by it.
SIZE_SETTINGS = ("requests",)


def read_figures(path: Path) -> dict[str, Any] | None:
    """The document, or None if there is no such file.

    Raises:
        FiguresError: the file is not a figures file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FiguresError(f"{path}: not readable as a figures file ({error})") from error
    if not isinstance(document, dict) or not isinstance(document.get("figures"), dict):
        raise FiguresError(f"{path}: a figures file has an object named 'figures'")
    return document


def provenance_of(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """All of `PROVENANCE` for one figure, its own fields before the file's."""
    figure = document["figures"][name]
    return {key: figure.get(key, document.get(key)) for key in PROVENANCE}


def merge_figures(
    existing: Mapping[str, Any] | None, new: Mapping[str, Any], force: bool = False
) -> dict[str, Any]:
    """The document that holds the figures of both, new ones in place of old ones of their name.

    Args:
        existing: document on disk, or None.
        new: document of one command, in the form above.
        force: let a smaller measurement replace a larger one.

    Raises:
        FiguresError: `new` lacks a field, is of another topic, or is smaller than what it replaces.
    """
    for key in ("topic", *PROVENANCE, "figures"):
        if key not in new:
            raise FiguresError(f"figures: field {key!r} is missing")
    if existing is not None and existing.get("topic") != new["topic"]:
        raise FiguresError(
            f"figures: topic {new['topic']!r} into a file of {existing.get('topic')!r}"
        )
    full = _expanded(existing) if existing is not None else {}
    added = _expanded(new)
    if not force:
        smaller = sorted(name for name in added.keys() & full.keys() if _smaller(added, full, name))
        if smaller:
            raise FiguresError(
                f"figures: {', '.join(smaller)} would be replaced by a smaller measurement; "
                "measure at least as much, or pass --force"
            )
    return _compressed(new, {**full, **added})


def _expanded(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {**figure, **provenance_of(document, name)}
        for name, figure in document["figures"].items()
    }


def _size(figure: Mapping[str, Any]) -> dict[str, float]:
    settings = figure.get("settings") or {}
    sizes = {key: settings[key] for key in SIZE_SETTINGS if key in settings}
    return {"repeats": figure.get("repeats") or 0, **sizes}


def _smaller(added: Mapping[str, Any], full: Mapping[str, Any], name: str) -> bool:
    new, old = _size(added[name]), _size(full[name])
    return any(new[key] < old[key] for key in new.keys() & old.keys())


def _compressed(newest: Mapping[str, Any], full: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Move the provenance shared by most figures (the newest, if as many share it) to the top."""

    def key_of(record: Mapping[str, Any]) -> str:
        return json.dumps([record[key] for key in PROVENANCE], sort_keys=True)

    counts = Counter(key_of(figure) for figure in full.values())
    newest_key = key_of(newest)
    top_key = max(counts, key=lambda key: (counts[key], key == newest_key), default=newest_key)
    top = dict(zip(PROVENANCE, json.loads(top_key), strict=True))
    figures = {}
    for name in sorted(full):
        figure = full[name]
        own = {key: figure[key] for key in PROVENANCE if figure[key] != top[key]}
        figures[name] = {**{key: figure.get(key) for key in FIGURE_FIELDS}, **own}
    return {"topic": newest["topic"], **top, "figures": figures}


def write_figures(path: Path, new: Mapping[str, Any], force: bool = False) -> dict[str, Any]:
    """Merge one command's figures into a file (made if missing) and return the document.

    The file is replaced in one step, so that a crash leaves the old one.

    Raises:
        FiguresError: see `merge_figures`; the file is then as before.
    """
    document = merge_figures(read_figures(path), new_rounded(new), force)
    replace_json(path, document)
    return document


def replace_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document, made whole beside the file and then put in its place.

    Raises:
        FiguresError: it cannot be written; the file is then as before.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise FiguresError(f"{path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def new_rounded(new: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data with short floats, equal to what reading it back gives."""
    plain: dict[str, Any] = rounded(dict(new))
    return plain
