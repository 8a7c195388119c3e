"""Entry point of the `sglang.srt.plugins` group. SGLang calls `load` once in every process.

Without `--vtoken-policy` (and without an inherited config) only the launcher hooks are registered:
they add the flags and otherwise pass everything through, so SGLang is stock.

SGLang swallows `Exception` from plugins. Refusals therefore leave as `SystemExit`, after one line
on stderr that says what is wrong.
"""

from __future__ import annotations

import os
import sys

from vtoken_sglang import SUPPORTED_SGLANG_VERSION
from vtoken_sglang.engine.plugin import installation
from vtoken_sglang.engine.plugin.hook import Hook, hooks_of, register, verify_landed
from vtoken_sglang.engine.plugin.installation import (
    installed_version,
    refuse,
    require_version,
    verify_installation,
)
from vtoken_sglang.errors import HookError, VTokenError
from vtoken_sglang.options import ENVIRONMENT_VARIABLE, from_environment

LAUNCHER_HOOKS = ("launcher",)  # modules of `vtoken_sglang.engine.hooks`
SCHEDULER_HOOKS = ("scheduler", "admission", "forward")

_registered: list[Hook] = []


def load() -> None:
    """Register this process's hooks and arrange for them to be verified.

    Exits the process when the product is asked for and any part of it cannot be put in place.
    """
    try:
        if not _asked() and installed_version() != SUPPORTED_SGLANG_VERSION:
            return  # stock
        require_version()
        config = from_environment()
        if config is not None:
            verify_installation()
        for module in LAUNCHER_HOOKS + (SCHEDULER_HOOKS if config is not None else ()):
            for hook in hooks_of(module):
                register(hook)
                _registered.append(hook)
        _verify_after_apply()
        if config is not None:
            from vtoken_sglang.engine.attention.backends import install_backends

            install_backends(config)
    except VTokenError as error:
        refuse(error)
    except Exception as error:
        if _asked():  # whatever it is, SGLang would log it and serve without us
            refuse(HookError("plugin", f"could not be put in place ({error!r})"))
        raise


def registered_hooks() -> tuple[Hook, ...]:
    """The hooks registered in this process."""
    return tuple(_registered)


def _asked() -> bool:
    """Whether this process was asked to virtualize tokens, by its parent or its command line."""
    return ENVIRONMENT_VARIABLE in os.environ or any(
        argument.startswith("--vtoken-") for argument in sys.argv[1:]
    )


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
            for hook in _registered:
                verify_landed(hook)
        except HookError as error:
            refuse(error)
        installation.mark_verified()

    HookRegistry.apply_hooks = apply_and_verify
