"""State and checks of the installed SGLang in this process: patches, upstream files, refusal."""

from __future__ import annotations

import sys
from typing import NoReturn

from vtoken_sglang import patching
from vtoken_sglang.engine.seams import Seam, verify_source
from vtoken_sglang.errors import VTokenError

_verified = False


def mark_verified() -> None:
    """Record that every seam registered in this process was found in place."""
    global _verified
    _verified = True


def is_verified() -> bool:
    """True when every seam registered in this process was found in place."""
    return _verified


def refuse(error: VTokenError) -> NoReturn:
    """Print one line and exit. Not an `Exception`, so SGLang cannot swallow it."""
    print(f"vtoken-sglang: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def verify_installation(seams: tuple[Seam, ...]) -> None:
    """Check patches and upstream files on disk. Raises SeamError naming what is missing."""
    root = patching.package_root()
    patching.check(root)
    patched = frozenset(patching.touched_files())
    for seam in seams:
        verify_source(seam, root, patched)
