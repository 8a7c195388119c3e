"""The arms of a comparison. An arm is data: a name, what it is, and how its server is started.

To add one, append an entry to `ARMS`; nothing else changes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve the same requests.

    Fields:
        name: key used on the command line and in results.
        summary: one sentence for the report.
        vtoken_args: flags for `vtoken-sglang serve`; None starts SGLang's own launcher instead.
        reference: the arm that ratios of this one are taken against, in the same repeat;
            None for arms that are only ever a reference.
    """

    name: str
    summary: str
    vtoken_args: tuple[str, ...] | None
    reference: str | None = None

    def launcher(self) -> list[str]:
        """Command words up to and including the launcher; engine flags follow."""
        if self.vtoken_args is None:
            return [sys.executable, "-m", "sglang.launch_server"]
        return [sys.executable, "-m", "vtoken_sglang.cli", "serve"]

    def command(self, engine_args: Sequence[str]) -> list[str]:
        """Full server command. `engine_args` are the same for every arm of a comparison."""
        return [*self.launcher(), *engine_args, *(self.vtoken_args or ())]


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(
            name="stock",
            summary="SGLang untouched: its own launcher and its own attention backend.",
            vtoken_args=None,
        ),
        Arm(
            name="native",
            summary="SGLang with this project's CPU attention backend and nothing else of it.",
            vtoken_args=("--vtoken-policy", "none", "--vtoken-arm", "native"),
            reference="stock",
        ),
        Arm(
            name="hook-only",
            summary="Token table and slot map in force on every step, nothing evicted.",
            vtoken_args=("--vtoken-policy", "none"),
            reference="native",
        ),
    )
}


def select_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """Return the named arms in the given order.

    Raises:
        ConfigError: no name, an unknown name, or a name given twice.
    """
    if not names:
        raise ConfigError("arms", "at least one arm is needed", list(names))
    for name in names:
        if name not in ARMS:
            raise ConfigError("arms", f"must be among {', '.join(ARMS)}", name)
    if len(set(names)) != len(names):
        raise ConfigError("arms", "each arm may be named once", ",".join(names))
    return tuple(ARMS[name] for name in names)


def rotated(arms: Sequence[Arm], repeat: int) -> tuple[Arm, ...]:
    """Order of arms in one repeat (counted from 0): rotated, so that no arm is always first."""
    shift = repeat % len(arms)
    return (*arms[shift:], *arms[:shift])
