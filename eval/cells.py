"""Finished cells of a grid on disk, so that an interrupted one goes on where it stopped.

    FOLDER/grid.json                    what is measured; a folder belongs to one grid for good
    FOLDER/cells/STUDY/ARM-REPEAT.json  one cell, written whole when it has been measured
    FOLDER/server-*.log

A cell is never measured twice and never overwritten; to measure anew, choose another folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .document import with_runs
from .errors import ResultsError
from .results import rounded, write_new

FORMAT = "vtoken-sglang-grid/1"
MANIFEST = "grid.json"
# What may differ between the calls that measure one grid; recorded with every cell instead.
PER_CALL = ("command", "commit", "versions", "machine", "patch_series", "started", "duration_s")
PER_CALL_SETTINGS = ("port", "startup_timeout")
CELL_KEYS = ("arm", "repeat", "at", "origin", "summary", "requests", "pool")


class CellStore:
    """The folder of one grid."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, studies: Sequence[Mapping[str, Any]]) -> None:
        """Make the folder, or check that it holds this grid.

        Args:
            studies: per study `name`, `setting` and `outline` (see `document.outline`).

        Raises:
            ResultsError: the folder holds another grid, or cannot be made.
        """
        if self.check(studies):
            return
        manifest = rounded({"format": FORMAT, "studies": list(studies)})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultsError(f"--out {self.folder}: {error.strerror}") from error
        write_new(self.folder / MANIFEST, json.dumps(manifest) + "\n")

    def check(self, studies: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the folder is there and holds this grid (see `open`).

        Raises:
            ResultsError: it holds another one.
        """
        if not (self.folder / MANIFEST).exists():
            return False
        if _comparable(self.manifest()) != _comparable(rounded({"studies": list(studies)})):
            raise ResultsError(
                f"{self.folder} holds another grid (other settings, arms or requests); "
                "choose another --out"
            )
        return True

    def manifest(self) -> dict[str, Any]:
        """What `open` wrote.

        Raises:
            ResultsError: there is none, or it is something else.
        """
        path = self.folder / MANIFEST
        try:
            manifest = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResultsError(f"{path}: not readable as a grid ({error})") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise ResultsError(f"{path}: format must be {FORMAT}")
        return manifest

    def path(self, study: str, arm: str, repeat: int) -> Path:
        """Where a cell is, or will be."""
        return self.folder / "cells" / study / f"{arm}-{repeat + 1}.json"

    def has(self, study: str, arm: str, repeat: int) -> bool:
        return self.path(study, arm, repeat).exists()

    def write(self, study: str, run: Mapping[str, Any]) -> None:
        """Save one cell. Raises ResultsError if it is there already."""
        path = self.path(study, str(run["arm"]), int(run["repeat"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, json.dumps(rounded(dict(run))) + "\n")

    def runs(self, study: str) -> list[dict[str, Any]]:
        """Every finished cell of a study, by repeat, then in the order they were measured."""
        found = []
        for path in sorted((self.folder / "cells" / study).glob("*.json")):
            try:
                run = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise _no_cell(path, str(error)) from error
            if not isinstance(run, dict) or any(key not in run for key in CELL_KEYS):
                raise _no_cell(path, f"an object with {', '.join(CELL_KEYS)} is expected")
            found.append(run)
        return sorted(found, key=lambda run: (run["repeat"], run["at"]))

    def results(self) -> list[dict[str, Any]]:
        """A result document per study that has a cell (see `document`), `study` and `setting` with
        it; provenance is that of the study's last cell, `commits` those of all."""
        documents = []
        for study in self.manifest()["studies"]:
            runs = self.runs(study["name"])
            if not runs:
                continue
            last = max(runs, key=lambda run: run["at"])
            took = sum(run["summary"]["duration_s"] for run in runs)
            document = with_runs({**study["outline"], **last["origin"]}, runs, took)
            document["study"], document["setting"] = study["name"], study["setting"]
            document["commits"] = sorted({str(run["origin"]["commit"]) for run in runs})
            documents.append(document)
        return documents


def _no_cell(path: Path, why: str) -> ResultsError:
    return ResultsError(
        f"{path}: not readable as a cell ({why}); delete it, and the next call measures it again"
    )


def _comparable(manifest: Mapping[str, Any]) -> list[Any]:
    compared = []
    for study in manifest["studies"]:
        outline = {key: value for key, value in study["outline"].items() if key not in PER_CALL}
        settings = outline.get("config", {})
        outline["config"] = {k: v for k, v in settings.items() if k not in PER_CALL_SETTINGS}
        compared.append([study["name"], outline])
    return compared
