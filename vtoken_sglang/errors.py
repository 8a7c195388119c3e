"""Typed errors. Each message names the thing at fault, the rule, and the value that broke it."""

LONGEST_VALUE = 200  # characters shown of a value: a client may send a whole document as one


class VTokenError(Exception):
    """Base class of every error this package raises on purpose."""


class ConfigError(VTokenError, ValueError):
    """An option is unknown or its value breaks a rule. Raised before any model loads."""

    def __init__(self, field: str, rule: str, value: object) -> None:
        self.field, self.rule, self.value = field, rule, value
        shown = repr(value)
        if len(shown) > LONGEST_VALUE:
            shown = f"{shown[:LONGEST_VALUE]}... ({len(shown)} characters)"
        super().__init__(f"{field}: {rule}, got {shown}")


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
