"""State and checks of the installed SGLang in this process: patches, upstream files, refusal."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import signal
import sys
from typing import NoReturn

from vtoken_sglang import SUPPORTED_SGLANG_VERSION, patching
from vtoken_sglang.engine.plugin.hook import Hook, verify_source
from vtoken_sglang.engine.plugin.upstream import UPSTREAM_SHA256
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


def verify_installation(hooks: tuple[Hook, ...]) -> None:
    """Check patches and upstream files on disk: those that hooks attach to, and those whose classes
    are extended. Raises HookError naming what is missing or changed."""
    root = patching.package_root()
    patching.check(root)
    patched = frozenset(patching.touched_files())
    names = dict.fromkeys(UPSTREAM_SHA256, "upstream")
    names.update((hook.source, hook.name) for hook in reversed(hooks))  # a file by its first hook
    for source, name in names.items():
        verify_source(name, source, root, patched)
