"""Measured runs on disk: one JSON line each, appended when it is complete, never rewritten.

    FOLDER/runs.jsonl    a head line with the resolved settings, then a line per run
    FOLDER/server-*.log  what the servers said

A second call with the same settings goes on where the first stopped; other settings are refused.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from .errors import ResultsError
from .results import rounded

FORMAT = "vtoken-sglang-runs/1"
RUNS = "runs.jsonl"
# What may differ between two calls that measure one study.
PER_CALL = ("startup_timeout",)


class RunStore:
    """The folder of one study.

    Raises:
        ResultsError: the folder holds a study with other settings, or cannot be made.
    """

    def __init__(self, folder: Path, head: Mapping[str, Any]) -> None:
        self.folder, self.path = folder, folder / RUNS
        head = rounded({"kind": "study", "format": FORMAT, **head})
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsError(f"--out {folder}: {error.strerror}") from error
        if self.path.exists():
            kept, self.runs = read_runs(self.path)
            if _same(kept) != _same(head):
                raise ResultsError(
                    f"{folder} holds a study with other settings or requests; choose another --out"
                )
            self._drop_torn_line()
            self._append({**head, "kind": "resumed"})
        else:
            self.runs = []
            self._append(head)

    def has(self, arm: str, load: int, repeat: int) -> bool:
        """Whether that run is there."""
        return (arm, load, repeat) in {_key(run) for run in self.runs}

    def add(self, run: Mapping[str, Any]) -> None:
        """Append a run. Raises ResultsError if it is there already."""
        if self.has(*_key(run)):
            raise ResultsError(f"{self.path}: {_key(run)} is there and is not overwritten")
        line = rounded({"kind": "run", **run})
        self._append(line)
        self.runs.append(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise ResultsError(f"{self.path}: {error.strerror}") from error

    def _drop_torn_line(self) -> None:
        """Cut off a last line whose writer was killed, so that the next one starts on its own."""
        text = self.path.read_bytes()
        if not text.endswith(b"\n"):
            with self.path.open("r+b") as stream:
                stream.truncate(text.rfind(b"\n") + 1)


def _key(run: Mapping[str, Any]) -> tuple[str, int, int]:
    return str(run["arm"]), int(run["load"]), int(run["repeat"])


def _same(head: Mapping[str, Any]) -> Any:
    options = {key: value for key, value in head["options"].items() if key not in PER_CALL}
    return [options, head["workload"]["fingerprint"], head["arms"]]


def new_folder(out: Path, name: str) -> Path:
    """`out/NAME-YYYYmmdd-HHMMSS`, the place of a study that was given none."""
    return out / f"{name}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"


def read_runs(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Head and runs of a file (`.gz` too) or of a study's folder; a torn last line is left out.

    Raises:
        ResultsError: nothing readable there, or not of this format.
    """
    if path.is_dir():
        path = path / RUNS
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ResultsError(f"{path}: not readable as a study ({reason})") from error
    lines = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            lines.append(json.loads(line))
        except ValueError as error:
            raise ResultsError(f"{path}: line {number} is no JSON ({error})") from error
    if not lines or not isinstance(lines[0], dict) or lines[0].get("format") != FORMAT:
        raise ResultsError(f"{path}: not a study (its first line must say format {FORMAT})")
    return lines[0], [line for line in lines[1:] if line["kind"] == "run"]
