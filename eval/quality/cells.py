"""What is compared: every policy at every keep ratio, full attention beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from vtoken_sglang.options import NO_POLICY, RequestOptions, VTokenConfig
from vtoken_sglang.policy.names import BUILT_IN

KEEPS: Final = (0.75, 0.5, 0.25)
SERVER: Final = VTokenConfig(policy="streaming_llm", keep=1.0, publish="never")
"""The settings every request starts from, on the served engine and in the reference alike."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one keep ratio; the policy "none" is full attention."""

    policy: str
    keep: float

    @property
    def name(self) -> str:
        """As in the names of figures: `h2o_keep50`, `full`."""
        return "full" if self.policy == NO_POLICY else f"{self.policy}_keep{round(100 * self.keep)}"

    def request(self, interval: int, seed: int = 0) -> dict[str, Any]:
        """What a request says in `custom_params["vtoken"]`.

        Args:
            interval: tokens between two looks for evicted.
            seed: of policies that draw.
        """
        if self.policy == NO_POLICY:
            return {"policy": NO_POLICY}
        return {"policy": self.policy, "keep": self.keep, "interval": interval, "seed": seed}

    def options(self, interval: int, seed: int = 0) -> RequestOptions:
        """The same, resolved as the server resolves it."""
        return RequestOptions.resolve(SERVER, self.request(interval, seed))


FULL: Final = Cell(NO_POLICY, 1.0)


def policy_names() -> tuple[str, ...]:
    """Policies that the product ships."""
    return tuple(sorted(BUILT_IN))


def grid(policies: Iterable[str], keeps: Iterable[float] = KEEPS) -> tuple[Cell, ...]:
    """Full attention first, then every policy at every ratio. A ratio of 1 evictions nothing, so on
    the reference it is full attention; the served run asks for it all the same."""
    keeps = tuple(keeps)
    return (FULL, *(Cell(policy, keep) for policy in policies for keep in keeps))
