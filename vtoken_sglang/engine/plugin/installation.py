"""State and checks of the installed SGLang in this process: version, upstream files, refusal."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from vtoken_sglang import SUPPORTED_SGLANG_VERSION
from vtoken_sglang.engine.plugin.upstream import PATCHED_SHA256, UPSTREAM_SHA256
from vtoken_sglang.errors import HookError, VTokenError

LAUNCHER = "MainProcess"  # multiprocessing's name for the process that nothing of it started

_verified = False


def mark_verified() -> None:
    """Record that every hook registered in this process was found in place."""
    global _verified
    _verified = True


def is_verified() -> bool:
    """True when every hook registered in this process was found in place."""
    return _verified


def require_verified() -> None:
    """Raise HookError unless every hook registered in this process was found in place."""
    if not _verified:
        raise HookError("plugin", "the hooks of this process were never verified")


def refuse(error: VTokenError) -> NoReturn:
    """Print one line and exit. Not an `Exception`, so SGLang cannot swallow it.

    The launcher notices that a scheduler ended. SGLang's data-parallel controller does not: it
    waits for the scheduler's word on a pipe that it holds open itself, and the launcher for the
    controller. It is told as SGLang's own failing schedulers tell it.
    """
    print(f"vtoken-sglang: {error}", file=sys.stderr, flush=True)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid and parent.name != LAUNCHER:
        os.kill(parent.pid, signal.SIGQUIT)
    raise SystemExit(2)


@contextlib.contextmanager
def exit_if_refused() -> Iterator[None]:
    """Turn an error of ours inside the block into process exit; see `refuse`."""
    try:
        yield
    except VTokenError as error:
        refuse(error)


def installed_version() -> str | None:
    """SGLang's version; None where it is not installed. Imports nothing of it."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def require_version() -> None:
    """Raise HookError unless the SGLang that this code was written for is installed."""
    found = installed_version()
    if found != SUPPORTED_SGLANG_VERSION:
        installed = "sglang is not installed" if found is None else f"sglang {found} is installed"
        raise HookError(
            "sglang-version",
            f"{installed}, only {SUPPORTED_SGLANG_VERSION} is supported",
            f"install sglang=={SUPPORTED_SGLANG_VERSION}",
        )


def package_root() -> Path:
    """The folder of the `sglang` package that this process imports; nothing of it is imported."""
    found = importlib.util.find_spec("sglang")
    assert found is not None, "the version was checked before"
    return Path(str(found.origin)).parent


def verify_installation() -> None:
    """Raise HookError unless every file that hooks attach to, or whose classes are extended, is as
    released, or as the series of `patches/` leaves it."""
    root = package_root()
    for source in UPSTREAM_SHA256:
        verify_source(source, root)


def verify_source(source: str, root: Path) -> None:
    """Raise HookError unless the file `source` below `root` is one of those written against."""
    known = [files[source] for files in (UPSTREAM_SHA256, PATCHED_SHA256) if source in files]
    path = root / source
    got = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if got not in known:
        raise HookError(
            "upstream",
            f"sglang/{source} differs from the supported release "
            f"(sha256 {got[:12]}, expected {known[0][:12]})",
            "reinstall the supported sglang, or remove the local change",
        )
