"""Typed errors that only the core raises."""

from vtoken_sglang.errors import VTokenError


class PositionError(VTokenError, ValueError):
    """A position may not be evicted or synchronised: unknown, or in the open tail page."""

    def __init__(self, what: str, rule: str, got: object) -> None:
        self.what, self.rule, self.got = what, rule, got
        super().__init__(f"{what}: {rule}, got {got!r}")


class CopyFailedError(VTokenError, RuntimeError):
    """A copy of K/V rows failed, or was asked for in a way that could lose bytes."""
