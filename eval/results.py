"""Result folders and files. A folder is made new for every run; a result is never overwritten."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from .errors import ResultsError

FORMAT = "vtoken-sglang-eval/1"
RESULT_NAME = "result.json"


def new_run_folder(out: Path, preset: str, now: datetime | None = None) -> Path:
    """Make `out/NNN-preset-YYYYmmdd-HHMMSS`, NNN one higher than any there.

    Raises:
        ResultsError: the folder cannot be made.
    """
    stamp = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    try:
        out.mkdir(parents=True, exist_ok=True)
        numbers = [
            int(path.name[:3])
            for path in out.iterdir()
            if path.is_dir() and path.name[:3].isdigit() and path.name[3:4] == "-"
        ]
        folder = out / f"{max(numbers, default=0) + 1:03d}-{preset}-{stamp}"
        folder.mkdir()
    except OSError as error:
        raise ResultsError(f"--out {out}: {error.strerror}") from error
    return folder


def rounded(value: Any) -> Any:
    """The same data with floats cut to 7 significant digits and tuples as lists."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def write_new(path: Path, text: str) -> None:
    """Write a file that must not exist yet, whole or not at all.

    Raises:
        ResultsError: it exists, or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.link(temporary, path)  # unlike a rename, fails if the target exists
    except FileExistsError as error:
        raise ResultsError(f"{path} exists and is not overwritten") from error
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_result(folder: Path, result: dict[str, Any], name: str = RESULT_NAME) -> Path:
    """Write a result into a run folder and return its path.

    Raises:
        ResultsError: the file exists, or cannot be written.
    """
    path = folder / name
    write_new(path, json.dumps(rounded({"format": FORMAT, **result})) + "\n")
    return path


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file, or `result.json` of a run folder.

    Raises:
        ResultsError: nothing readable there, or not a result of this format.
    """
    target = path / RESULT_NAME if path.is_dir() else path
    try:
        result = json.loads(target.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{target}: {error.strerror}") from error
    except ValueError as error:
        raise ResultsError(f"{target}: not JSON ({error})") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        found = result.get("format") if isinstance(result, dict) else type(result).__name__
        raise ResultsError(f"{target}: format must be {FORMAT}, got {found!r}")
    return result
