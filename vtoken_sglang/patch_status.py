"""What state the SGLang patches are in, judged by file content alone.

`root` is always the `sglang` package directory; paths are relative to it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from vtoken_sglang.errors import HookError
from vtoken_sglang.patch_series import REINSTALL, Series

STAMP_NAME = ".vtoken_patches.json"
APPLY = "run `vtoken-sglang patch --apply`"
_SHOWN_HEX = 12


class State(StrEnum):
    """State of a file, or of a patch over its files. Only a patch can be partial."""

    PRISTINE = "pristine"
    APPLIED = "applied"
    PARTIAL = "partial"
    MODIFIED = "modified"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStatus:
    """One touched file.

    Fields:
        path: relative to the `sglang` package.
        state: never PARTIAL.
        expected: sha256 of the released file, hex.
        got: sha256 of the file on disk, hex; None when missing.
    """

    path: str
    state: State
    expected: str
    got: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatus:
    """One patch and the files it touches."""

    name: str
    subject: str
    files: tuple[FileStatus, ...]

    @property
    def state(self) -> State:
        """The files' common state, else the worst: missing, then modified, then partial."""
        states = {file.state for file in self.files}
        if len(states) == 1:
            return states.pop()
        return next((s for s in (State.MISSING, State.MODIFIED) if s in states), State.PARTIAL)


def package_root() -> Path:
    """Directory of the installed `sglang`, found without importing it. Raises HookError."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise HookError("sglang", "package is not installed", REINSTALL)
    return Path(next(iter(spec.submodule_search_locations)))


def require_release(root: Path, series: Series) -> None:
    """Raise HookError unless the package at `root` is the release the series is for."""
    version_file = root / "_version.py"
    text = version_file.read_text() if version_file.exists() else ""
    found = re.search(r"^__version__ = .*'([^']+)'$", text, re.MULTILINE)
    if found is None or found[1] != series.version:
        got = f"sglang {found[1]}" if found else "no sglang release"
        raise HookError("sglang-version", f"{got} at {root}, not {series.version}", REINSTALL)


def file_statuses(root: Path, series: Series) -> dict[str, FileStatus]:
    """State of every touched file, by path, sorted."""
    return {path: _file_status(root, series, path) for path in sorted(series.pristine_sha256)}


def patch_statuses(series: Series, files: Mapping[str, FileStatus]) -> list[PatchStatus]:
    """The same by patch, in series order."""
    return [
        PatchStatus(
            name=patch.name,
            subject=patch.header["Subject"],
            files=tuple(files[path] for path in patch.files),
        )
        for patch in series.patches
    ]


def refuse_foreign(root: Path, series: Series, patches: Sequence[PatchStatus]) -> None:
    """Raise HookError naming each file that is neither as released nor as this series leaves it."""
    for patch in patches:
        bad = [file for file in patch.files if file.state in (State.MISSING, State.MODIFIED)]
        if not bad:
            continue
        problem = "; ".join(
            f"sglang/{file.path} is {file.state}: sha256 expected {file.expected[:_SHOWN_HEX]} "
            f"(or that file with this patch), got "
            f"{file.got[:_SHOWN_HEX] if file.got else 'no file'}"
            for file in bad
        )
        stamped = _stamped_series(root)
        if stamped not in (None, series.sha256):
            problem += "; the package was patched by another version of this one"
        raise HookError(patch.name, problem, f"{REINSTALL}, then {APPLY}")


def stamp_content(series: Series, patched_sha256: Mapping[str, str]) -> bytes:
    """The stamp of this series.

    Args:
        patched_sha256: touched file -> sha256 of its patched content, hex.
    """
    stamp = {
        "sglang": series.version,
        "series_sha256": series.sha256,
        "files": dict(sorted(patched_sha256.items())),
    }
    return (json.dumps(stamp, indent=1) + "\n").encode()


def stamp_is(root: Path, content: bytes) -> bool:
    """Whether the package carries exactly this stamp."""
    stamp = root / STAMP_NAME
    return stamp.is_file() and stamp.read_bytes() == content


def _stamped_series(root: Path) -> str | None:
    try:
        stamp = json.loads((root / STAMP_NAME).read_text())
    except (OSError, ValueError):
        return None
    return str(stamp.get("series_sha256")) if isinstance(stamp, dict) else None


def _file_status(root: Path, series: Series, path: str) -> FileStatus:
    expected = series.pristine_sha256[path]
    if not (root / path).is_file():
        return FileStatus(path=path, state=State.MISSING, expected=expected, got=None)
    content = (root / path).read_bytes()
    got = hashlib.sha256(content).hexdigest()
    state = State.PRISTINE if got == expected else State.MODIFIED
    if state is State.MODIFIED:
        try:
            restored = series.restore_content(path, content)
        except HookError:
            restored = b""
        if hashlib.sha256(restored).hexdigest() == expected:
            state = State.APPLIED
    return FileStatus(path=path, state=state, expected=expected, got=got)
