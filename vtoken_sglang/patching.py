"""Check, apply and reverse the SGLang patches of this package. Imports neither SGLang nor torch.

Every function takes the `sglang` package directory as `root` (default: the one Python would
import) and the series (default: the one in this package). A file is judged by its content alone;
the stamp records which series was applied.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

from vtoken_sglang.errors import HookError
from vtoken_sglang.patch_overlay import stage_pristine_overlay
from vtoken_sglang.patch_series import Series, shipped_series
from vtoken_sglang.patch_status import (
    APPLY,
    STAMP_NAME,
    FileStatus,
    PatchStatus,
    State,
    file_statuses,
    package_root,
    patch_statuses,
    refuse_foreign,
    require_release,
    stamp_content,
    stamp_is,
)
from vtoken_sglang.patch_writer import exclusive, replace_files

__all__ = [
    "FileStatus",
    "PatchStatus",
    "State",
    "apply",
    "check",
    "main",
    "package_root",
    "reverse",
    "series_hash",
    "stage_pristine_overlay",
    "status",
    "touched_files",
]


def series_hash() -> str:
    """sha256 over the series and its patches, hex: names the patches in result files."""
    return shipped_series().sha256


def touched_files() -> tuple[str, ...]:
    """The files the series changes, relative to the `sglang` package, sorted."""
    return tuple(sorted(shipped_series().pristine_sha256))


def status(root: Path | None = None, series: Series | None = None) -> list[PatchStatus]:
    """State of every patch, in series order. Changes nothing.

    Raises: HookError when sglang is not installed or this package's patch files are broken.
    """
    root, series = root or package_root(), series or shipped_series()
    return patch_statuses(series, file_statuses(root, series))


def check(root: Path | None = None, series: Series | None = None) -> list[PatchStatus]:
    """Return `status` when every patch is applied and the package stamped.

    Raises: HookError on another release, and naming the first patch that is not applied, with its
        files, and for a file that someone else changed the hashes.
    """
    root, series = root or package_root(), series or shipped_series()
    require_release(root, series)
    files = file_statuses(root, series)
    patches = patch_statuses(series, files)
    refuse_foreign(root, series, patches)
    for patch in patches:
        if patch.state is not State.APPLIED:
            pending = [f"sglang/{f.path}" for f in patch.files if f.state is State.PRISTINE]
            raise HookError(patch.name, f"patch is not applied to {', '.join(pending)}", APPLY)
    if not stamp_is(root, stamp_content(series, {path: str(f.got) for path, f in files.items()})):
        raise HookError("patches", f"{STAMP_NAME} is missing or names another series", APPLY)
    return patches


def apply(root: Path | None = None, series: Series | None = None) -> bool:
    """Apply every patch that is not applied yet, all or none, and stamp the package.

    Returns: False when all was in place already.
    Raises: HookError, with nothing changed, on another release, on a file that is neither as
        released nor as patched, on a hunk that does not fit, and when a file cannot be written.
    """
    root, series = root or package_root(), series or shipped_series()
    require_release(root, series)
    with exclusive(root):
        files = file_statuses(root, series)
        refuse_foreign(root, series, patch_statuses(series, files))
        contents: dict[Path, bytes | None] = {}
        patched_sha256: dict[str, str] = {}
        for path, file in files.items():
            patched = content = (root / path).read_bytes()
            if file.state is State.PRISTINE:
                contents[root / path] = patched = series.patch_content(path, content)
                if series.restore_content(path, patched) != content:
                    raise HookError("patches", f"sglang/{path} could not be reversed later")
            patched_sha256[path] = hashlib.sha256(patched).hexdigest()
        stamp = stamp_content(series, patched_sha256)
        if not stamp_is(root, stamp):
            contents[root / STAMP_NAME] = stamp
        replace_files(contents)
    return bool(contents)


def reverse(root: Path | None = None, series: Series | None = None) -> bool:
    """Give every patched file its released content back, all or none, and remove the stamp.

    Returns: False when nothing was applied.
    Raises: HookError as `apply` does.
    """
    root, series = root or package_root(), series or shipped_series()
    require_release(root, series)
    with exclusive(root):
        files = file_statuses(root, series)
        refuse_foreign(root, series, patch_statuses(series, files))
        contents: dict[Path, bytes | None] = {
            root / path: series.restore_content(path, (root / path).read_bytes())
            for path, file in files.items()
            if file.state is State.APPLIED
        }
        if (root / STAMP_NAME).exists():
            contents[root / STAMP_NAME] = None
        replace_files(contents)
    return bool(contents)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: `--check`, `--apply`, `--reverse`. Returns 0, or 1 and one line on stderr."""
    options = _parse(argv)
    failure: Exception | None = None
    try:
        root: Path = options.root or package_root()
        try:
            print(_run(options, root), flush=True)
        except (HookError, OSError) as error:
            failure = error
        for patch in status(root):
            print(f"{patch.state:<9} {patch.name}: {patch.subject}", flush=True)
    except (HookError, OSError) as error:
        failure = failure or error
    if failure is not None:
        print(f"vtoken-sglang: {failure}", file=sys.stderr, flush=True)
    return int(failure is not None)


def _run(options: argparse.Namespace, root: Path) -> str:
    if options.reverse:
        return "patches reversed" if reverse(root) else "nothing to reverse: no patch is applied"
    applied = options.apply and apply(root)
    check(root)
    if options.apply:
        return "patches applied" if applied else "nothing to do: patches were applied before"
    return f"all patches are applied, series {series_hash()[:12]}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    description = "Check, apply or reverse the SGLang patches."
    parser = argparse.ArgumentParser(prog="vtoken-sglang patch", description=description)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="fail unless all are applied")
    action.add_argument("--apply", action="store_true", help="apply them; safe to repeat")
    action.add_argument("--reverse", action="store_true", help="restore the released files")
    parser.add_argument("--root", type=Path, help="sglang package directory (default: installed)")
    return parser.parse_args(argv)
