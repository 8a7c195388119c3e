"""Typed errors. Each message names the thing at fault, the rule, and the value that broke it.

What a user sent is only ever shown by `shown` and `shortened`: bounded in depth and in length,
whatever it is.
"""

from __future__ import annotations

import reprlib
from typing import Final

MAX_SHOWN: Final = 160
"""Characters shown of a value, or of a name: a client may send a whole document as one."""


class _Bounded(reprlib.Repr):
    """Goes `maxlevel` deep and no further."""

    def repr_instance(self, x: object, level: int) -> str:
        return repr(x)  # reprlib would show an address where that fails


_BOUNDED = _Bounded()
_BOUNDED.maxlevel = 3
_BOUNDED.maxstring = _BOUNDED.maxlong = MAX_SHOWN


def shown(value: object) -> str:
    """`repr` of any value, on one line of at most `MAX_SHOWN` characters."""
    try:
        text = _BOUNDED.repr(value)
    except Exception:  # an int of too many digits; anybody's class, which may fail to show itself
        text = f"a {type(value).__name__}"
    return shortened(text)


def shortened(text: str) -> str:
    """`text` as it is, or what can be shown of it on one line of `MAX_SHOWN` characters."""
    text = _cut(text)
    return text if text.isprintable() else _cut(repr(text))


def _cut(text: str) -> str:
    half = (MAX_SHOWN - 3) // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}...{text[-half:]}"


class VTokenError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(VTokenError, ValueError):
    """An option is unknown or its value breaks a rule. Raised before any model loads."""

    def __init__(self, field: str, rule: str, value: object) -> None:
        self.field, self.rule, self.value = shortened(field), rule, value
        super().__init__(f"{self.field}: {rule}, got {shown(value)}")


class UnsupportedModeError(VTokenError):
    """The engine was asked for a mode that token virtualization does not support."""

    def __init__(self, flag: str, reason: str, remedy: str) -> None:
        self.flag, self.reason, self.remedy = flag, reason, remedy
        super().__init__(f"{flag} is not supported: {reason}. Remedy: {remedy}")


class HookError(VTokenError):
    """A hook or patch that the product relies on is missing, changed, or did not land."""

    def __init__(self, hook: str, problem: str, remedy: str = "") -> None:
        self.hook, self.problem, self.remedy = hook, problem, remedy
        super().__init__(f"hook {hook}: {problem}" + (f". Remedy: {remedy}" if remedy else ""))


class InvariantError(VTokenError, RuntimeError):
    """`violations()` found the token table and the pool disagreeing."""


class StalePlanError(VTokenError, RuntimeError):
    """A plan no longer matches its row (generation, record or request state changed)."""
