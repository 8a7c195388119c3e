"""Raw results of one measurement, one JSON line per unit of work, so that it can be resumed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from vtoken_sglang_eval.errors import ResultsError
from vtoken_sglang_eval.results import rounded


class Rows:
    """A file whose first line holds the settings and each later one a unit's result.

    Fields:
        found: unit id -> its result, in the order in which they were measured.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open or make the file.

        Raises:
            ResultsError: it was made with other settings, or is not such a file.
        """
        self._path = path
        self.settings: dict[str, Any] = rounded(settings)
        self.found: dict[str, Any] = {}
        if not path.exists():
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(self.settings) + "\n", encoding="utf-8")
            except OSError as error:
                raise ResultsError(f"{path}: {error.strerror}") from error
            return
        header, self.found = read_rows(path)
        if header != self.settings:
            differing = sorted(
                key
                for key in {*header, *self.settings}
                if header.get(key) != self.settings.get(key)
            )
            raise ResultsError(
                f"{path}: was measured with other settings ({', '.join(differing)}); "
                "give another --work folder"
            )

    def add(self, unit: str, result: Any) -> None:
        """Keep one unit's result, on disk before this returns."""
        line = json.dumps({"unit": unit, "result": rounded(result)})
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        self.found[unit] = rounded(result)


def read_rows(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of such a file, and its results by unit.

    Raises:
        ResultsError: it is not such a file.
    """
    try:
        header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return header, {line["unit"]: line["result"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path}: not a file of measured rows ({error})") from error


class Deadline:
    """A time budget; work is stopped between units, never inside one."""

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        return self._end is not None and time.monotonic() > self._end
