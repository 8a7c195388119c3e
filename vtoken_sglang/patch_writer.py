"""Replace several files of an installed package, all or none.

Installed files may be hard links into a package cache that other environments share, so nothing is
written in place: the new content goes to a file beside the old one and takes over its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import py_compile
import stat
import tempfile
from collections.abc import Iterator, Mapping
from glob import escape
from pathlib import Path

from vtoken_sglang.errors import HookError
from vtoken_sglang.patch_series import REINSTALL

_NEW_FILE_MODE = 0o644


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Hold an advisory lock on `directory` itself, so that two runs do not interleave."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace_files(contents: Mapping[Path, bytes | None]) -> None:
    """Give every file its new content (None: no file), or leave all of them as they were.

    File modes are kept; a file that is new gets 0644. Each file changes atomically. Compiled
    bytecode of a replaced module is renewed.

    Raises: HookError when a file cannot be read or written, after undoing the files already done.
    """
    path, previous = Path(), dict[Path, bytes | None]()
    try:
        for path in contents:
            previous[path] = path.read_bytes() if path.exists() else None
        for path, content in contents.items():
            _replace(path, content)
    except BaseException as error:
        _undo(previous)
        if isinstance(error, OSError):
            problem = f"cannot change {path} ({error.strerror}); nothing was changed"
            raise HookError("patches", problem, "make the sglang package writable") from error
        raise
    for path in contents:
        renew_bytecode(path)


def renew_bytecode(source: Path) -> None:
    """Drop compiled bytecode of `source`, for every interpreter; recompile it for this one.

    Bytecode is matched by mtime in whole seconds and by size, or not at all, so a stale file could
    outlive a swap. It is compiled again only if it was there: where processes do not write
    bytecode, a file left without would be compiled by each of them anew.
    """
    if source.suffix != ".py":
        return
    current = Path(importlib.util.cache_from_source(str(source)))
    compiled_before = current.exists()
    for stale in current.parent.glob(f"{escape(source.stem)}.*.pyc"):
        stale.unlink(missing_ok=True)
    if compiled_before and source.exists():
        # Absent bytecode is only slow, and a module that does not compile says so on import.
        with contextlib.suppress(OSError, py_compile.PyCompileError):
            py_compile.compile(str(source), doraise=True)


def _undo(previous: Mapping[Path, bytes | None]) -> None:
    broken: list[str] = []
    for path, content in previous.items():
        try:
            if (path.read_bytes() if path.exists() else None) != content:
                _replace(path, content)
                renew_bytecode(path)
        except OSError as error:
            broken.append(f"{path} ({error.strerror})")
    if broken:
        raise HookError("patches", f"could not put back {', '.join(broken)}", REINSTALL)


def _replace(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        return
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else _NEW_FILE_MODE
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
