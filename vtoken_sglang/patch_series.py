"""The patch series shipped with this package: which patches, for which SGLang files.

Paths in this module are relative to the `sglang` package directory (`srt/managers/scheduler.py`);
the patch files and `UPSTREAM` write them with a leading `sglang/`.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources.abc import Traversable

from vtoken_sglang import SUPPORTED_SGLANG_VERSION
from vtoken_sglang.errors import HookError
from vtoken_sglang.patch_diff import FileDiff, parse_patch

HEADER_FIELDS = ("Subject", "Why-not-a-hook", "Base", "Forwarded", "Remove-when")
PACKAGE_PREFIX = "sglang/"
REINSTALL = f"reinstall sglang=={SUPPORTED_SGLANG_VERSION}"
_SERIES, _UPSTREAM = "series", "UPSTREAM"
_BROKEN_PACKAGE = "reinstall vtoken-sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One patch file. `name` has no suffix; `header` holds at least `HEADER_FIELDS`."""

    name: str
    header: Mapping[str, str]
    diffs: tuple[FileDiff, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Touched files, relative to the `sglang` package."""
        return tuple(_package_path(diff) for diff in self.diffs)

    @property
    def changed_lines(self) -> int:
        """Lines removed plus lines added, over all files."""
        return sum(diff.changed_lines for diff in self.diffs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """All patches, in the order they are applied.

    Fields:
        version: the SGLang release the patches are for.
        pristine_sha256: touched file -> sha256 of its released content, hex.
        patches: in order of application.
        sha256: over the series file and every patch, hex; names this series in results.
    """

    version: str
    pristine_sha256: Mapping[str, str]
    patches: tuple[Patch, ...]
    sha256: str

    def patch_content(self, file: str, pristine: bytes) -> bytes:
        """Return the patched content of one file. Raises HookError when a hunk does not fit."""
        for diff in self._diffs_of(file):
            pristine = diff.apply(pristine)
        return pristine

    def restore_content(self, file: str, patched: bytes) -> bytes:
        """Inverse of `patch_content`. Raises HookError when a hunk does not fit."""
        for diff in reversed(tuple(self._diffs_of(file))):
            patched = diff.reverse(patched)
        return patched

    def _diffs_of(self, file: str) -> Iterator[FileDiff]:
        for patch in self.patches:
            for diff in patch.diffs:
                if _package_path(diff) == file:
                    yield diff


@lru_cache(maxsize=1)
def shipped_series() -> Series:
    """The series in this package. Raises HookError when the package data is incomplete."""
    return load_series(importlib.resources.files("vtoken_sglang_patches"))


def load_series(directory: Traversable) -> Series:
    """Read and cross-check `series`, `UPSTREAM` and the patch files of one directory.

    Raises: HookError naming the file at fault when a listed patch is absent, a patch is not listed,
    a header field is missing, a base or release is wrong, or touched files and UPSTREAM disagree.
    """
    series_data = _read(directory, _SERIES)
    digest = hashlib.sha256(b"%d\n" % len(series_data) + series_data)
    patches = []
    for file_name in _listed_patches(directory, series_data):
        data = _read(directory, file_name)
        digest.update(f"{file_name} {len(data)}\n".encode() + data)
        name = file_name.removesuffix(".patch")
        header, diffs = parse_patch(name, data)
        patches.append(Patch(name=name, header=header, diffs=diffs))
    version, pristine = _read_upstream(_read(directory, _UPSTREAM))
    for patch in patches:
        _check_header(patch, version)
    touched = {file for patch in patches for file in patch.files}
    if touched != set(pristine):
        raise HookError(
            _UPSTREAM,
            f"its files and the patches' differ in {sorted(touched ^ set(pristine))}",
            _BROKEN_PACKAGE,
        )
    return Series(
        version=version,
        pristine_sha256=pristine,
        patches=tuple(patches),
        sha256=digest.hexdigest(),
    )


def _read(directory: Traversable, name: str) -> bytes:
    try:
        return (directory / name).read_bytes()
    except OSError as error:
        raise HookError(name, f"patch series file cannot be read ({error})", _BROKEN_PACKAGE) from (
            error
        )


def _listed_patches(directory: Traversable, series_data: bytes) -> list[str]:
    lines = (line.strip() for line in series_data.decode().splitlines())
    listed = [line for line in lines if line and not line.startswith("#")]
    present = {entry.name for entry in directory.iterdir() if entry.name.endswith(".patch")}
    if not listed or len(set(listed)) != len(listed) or set(listed) != present:
        raise HookError(_SERIES, f"lists {listed}, present are {sorted(present)}", _BROKEN_PACKAGE)
    return listed


def _read_upstream(data: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = data.decode().splitlines()
    if first != f"sglang {SUPPORTED_SGLANG_VERSION}":
        raise HookError(
            _UPSTREAM, f"is for {first!r}, not sglang {SUPPORTED_SGLANG_VERSION}", _BROKEN_PACKAGE
        )
    pristine: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  sglang/(\S+)", line)
        if match is None or match[2] in pristine:
            raise HookError(_UPSTREAM, f"malformed line {line!r}", _BROKEN_PACKAGE)
        pristine[match[2]] = match[1]
    return SUPPORTED_SGLANG_VERSION, pristine


def _check_header(patch: Patch, version: str) -> None:
    missing = [field for field in HEADER_FIELDS if field not in patch.header]
    if missing:
        raise HookError(patch.name, f"patch header lacks {missing}", _BROKEN_PACKAGE)
    if patch.header["Base"] != f"sglang {version}":
        raise HookError(patch.name, f"patch base is {patch.header['Base']!r}", _BROKEN_PACKAGE)
    if not all(diff.path.startswith(PACKAGE_PREFIX) for diff in patch.diffs):
        raise HookError(patch.name, f"patch touches files outside {PACKAGE_PREFIX}")


def _package_path(diff: FileDiff) -> str:
    return diff.path.removeprefix(PACKAGE_PREFIX)
