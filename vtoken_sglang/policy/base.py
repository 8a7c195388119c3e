"""What a policy is: it scores live tokens. The runtime decides how many die, protects sinks and
recent tokens, and marks the evicted (DESIGN: policy -> token table -> planner).

A policy says what it must see (`observation`, `reads_keys`); the rest of a view costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from vtoken_sglang.errors import VTokenError, shown


class PolicyError(VTokenError, RuntimeError):
    """A policy raised an error, or returned something that is not a score for each live token."""

    def __init__(self, policy: object, rule: str, value: object) -> None:
        self.policy, self.rule, self.value = type(policy).__name__, rule, value
        super().__init__(f"policy {self.policy}: scores {rule}, got {shown(value)}")


class Gather(Enum):
    """What is gathered of the attention weights that a token receives, over query tokens.

    Weights are softmax probabilities over the live keys that the query sees. All are pooled as
    the mean over query heads and sampled layers.

    TOTAL: their sum over every observed query since the request began.
    LAST: the weight from the last observed query alone.
    PROMPT_END: their sum over the last `window` queries of the prompt, as far as the prompt's last
        chunk computed them; nothing afterwards.
    BELOW_UNIFORM: how many observed queries of the history window gave the token less than an equal
        share (1 / keys seen). The history window is cut at multiples of `window` positions: it
        holds the block of the last observed query and the one before.
    """

    TOTAL = "total"
    LAST = "last"
    PROMPT_END = "prompt end"
    BELOW_UNIFORM = "below_uniform"


@dataclass(frozen=True, slots=True)
class Observation:
    """What a policy needs to know of attention; `window` in tokens where the kind has one.

    Raises:
        ValueError: a kind with a window, and none given.
    """

    gather: Gather
    window: int = 0

    def __post_init__(self) -> None:
        if self.window < 1 and self.gather in (Gather.PROMPT_END, Gather.BELOW_UNIFORM):
            raise ValueError(f"Observation: {self.gather} needs a window of at least 1 token")


def _no_keys() -> Iterator[Tensor]:
    raise RuntimeError("this policy does not declare reads_keys, so its view has no keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """What a policy sees of one request. Valid only during the call; must not be written to.

    Fields:
        positions: int64 [n_live]. Logical positions of the live tokens, strictly ascending.
            Evicted tokens are absent; a position never changes, whatever moves in memory. On the
            CPU, or on the model's device for a policy that looks at keys or attention.
        logical_len: tokens the request has had so far, dead ones included.
        request_seed: the request's seed, in [0, 2**63).
        attention: float32 [n_live], what the policy's `observation` asks for; zeros where nothing
            was observed yet; None for a policy that asks for nothing.
        observed_len: no observed query saw the tokens from this position on.
        layer_keys: for a policy that declares `reads_keys`: one float32 [n_live, kv_heads, dim] per
            layer, rotary embedding applied, gathered from the cache when asked for.
    """

    positions: Tensor
    logical_len: int
    request_seed: int
    attention: Tensor | None = None
    observed_len: int = 0
    layer_keys: Callable[[], Iterator[Tensor]] = _no_keys


class Policy(ABC):
    """One instance serves every request of a process, so a policy keeps no per-request state.

    Its parameters are the fields of a dataclass with defaults; a policy without any needs none.
    """

    reads_keys: ClassVar[bool] = False

    def observation(self) -> Observation | None:
        """What of attention the view must hold; None (nothing is observed) unless overridden."""
        return None

    @abstractmethod
    def score(self, view: PolicyView) -> Tensor:
        """Importance of each live token; the lowest die first, equal ones by lower position.

        For a policy that looks at keys or attention this runs on the model's device and must not
        read a tensor back (no `.item()`, no branch on a value): the host would wait.

        Returns:
            float32 [n_live], same device and order as `view.positions`, every value finite.
        """


def attention_or_best(view: PolicyView) -> Tensor:
    """`view.attention`, where a token that no observed query saw counts as much as the best one:
    it is too new to be judged. If nothing was observed at all, every token scores 0."""
    assert view.attention is not None, "the policy's observation() asks for none"
    unseen = view.positions >= view.observed_len
    return torch.where(unseen, view.attention.max(), view.attention)
