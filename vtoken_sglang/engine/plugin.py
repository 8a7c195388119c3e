"""Entry point of the `sglang.srt.plugins` group. SGLang calls `load` once in every process.

Without `--vtoken-policy` (and without an inherited config) only the launcher seams are registered:
they add the flags and otherwise pass everything through, so SGLang is stock.

SGLang swallows `Exception` from plugins. Refusals therefore leave as `SystemExit`, after one line
on stderr that says what is wrong.
"""

from __future__ import annotations

import importlib.metadata
import sys

from vtoken_sglang import SUPPORTED_SGLANG_VERSION
from vtoken_sglang.config import VTokenConfig, from_environment
from vtoken_sglang.engine import installation
from vtoken_sglang.engine.installation import refuse, verify_installation
from vtoken_sglang.engine.seams import (
    LAUNCHER_SEAMS,
    SCHEDULER_SEAMS,
    Seam,
    register,
    verify_landed,
)
from vtoken_sglang.errors import SeamError, VTokenError

_registered: list[Seam] = []


def load() -> None:
    """Register this process's seams and arrange for them to be verified.

    Exits the process when the product is asked for and any part of it cannot be put in place.
    """
    try:
        config = from_environment()
        if not _version_supported(config):
            return
        seams = LAUNCHER_SEAMS + (SCHEDULER_SEAMS if config is not None else ())
        if config is not None:
            verify_installation(seams)
        for seam in seams:
            register(seam)
        _registered.extend(seams)
        _verify_after_apply()
        if config is not None:
            from vtoken_sglang.engine.backends import install_backends

            install_backends(config)
    except VTokenError as error:
        refuse(error)


def registered_seams() -> tuple[Seam, ...]:
    """The seams registered in this process."""
    return tuple(_registered)


def _version_supported(config: VTokenConfig | None) -> bool:
    """Return False (stay stock) on another SGLang when nobody asked for us; raise when asked."""
    installed = importlib.metadata.version("sglang")
    if installed == SUPPORTED_SGLANG_VERSION:
        return True
    asked = config is not None or any(arg.startswith("--vtoken-") for arg in sys.argv[1:])
    if asked:
        raise SeamError(
            "sglang-version",
            f"sglang {installed} is installed, only {SUPPORTED_SGLANG_VERSION} is supported",
            f"install sglang=={SUPPORTED_SGLANG_VERSION}",
        )
    return False


def _verify_after_apply() -> None:
    """Wrap `HookRegistry.apply_hooks`, which SGLang calls after all plugins, to verify ours.

    The hooks are not applied here: a target is patched once, and other plugins that hook the same
    target after us must still get their turn.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = HookRegistry.apply_hooks

    def apply_and_verify() -> None:
        original()
        try:
            for seam in _registered:
                verify_landed(seam)
        except SeamError as error:
            refuse(error)
        installation.mark_verified()

    HookRegistry.apply_hooks = apply_and_verify
