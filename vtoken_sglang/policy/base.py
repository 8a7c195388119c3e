"""What a policy is: it scores live tokens. The runtime decides how many die, protects sinks and
recent tokens, and marks the victims (DESIGN: policy -> token table -> planner)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from vtoken_sglang.errors import VTokenError


class PolicyError(VTokenError, RuntimeError):
    """A policy returned something that is not a score for each live token."""

    def __init__(self, policy: object, rule: str, value: object) -> None:
        self.policy, self.rule, self.value = type(policy).__name__, rule, value
        super().__init__(f"policy {self.policy}: scores {rule}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """What a policy sees of one request. Valid only during the call; must not be written to.

    Fields:
        positions: int64 [n_live], CPU. Logical positions of the live tokens, strictly ascending.
            Killed tokens are absent; a position never changes, whatever moves in memory.
        logical_len: tokens the request has had so far, dead ones included.
        request_seed: the request's seed, in [0, 2**63).
    """

    positions: Tensor
    logical_len: int
    request_seed: int


class Policy(ABC):
    """One instance serves every request of a process, so a policy keeps no per-request state.

    Its parameters are the fields of a dataclass with defaults; a policy without any needs none.
    """

    @abstractmethod
    def score(self, view: PolicyView) -> Tensor:
        """Importance of each live token; the lowest die first, equal ones by lower position.

        Returns:
            float32 [n_live], same device and order as `view.positions`, every value finite.
        """
