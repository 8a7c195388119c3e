"""What a policy is: it scores live tokens. The runtime decides how many are evicted, protects sinks
and recent tokens, and marks the evicted (policy -> token table -> planner).

A policy says what it must see (`observation`, `reads_keys`); the rest of a view costs nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from vtoken_sglang.errors import VTokenError, shown

MAX_WIDTH: Final = 1023


class PolicyError(VTokenError, RuntimeError):
    """A policy raised an error, or returned something that is not a score for each live token."""

    def __init__(self, policy: object, rule: str, value: object) -> None:
        self.policy, self.rule, self.value = type(policy).__name__, rule, value
        super().__init__(f"policy {self.policy}: scores {rule}, got {shown(value)}")


class Gather(Enum):
    """What is gathered of the attention weights that a token receives, over query tokens.

    Weights are softmax probabilities over the live keys that the query sees. They are pooled over
    query heads as `Pool` says, and then averaged over sampled layers.

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


class Pool(Enum):
    """How a layer's weights are pooled over its query heads.

    MEAN: their mean.
    MAX: what the head gave that gave the token most, over all queries observed. PROMPT_END alone:
        its queries are computed by one forward, so that nothing depends on how they were batched.
    """

    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class Observation:
    """What a policy needs to know of attention; `window` in tokens where the kind has one.

    Raises:
        ValueError: a kind with a window, and none given; MAX for another kind than PROMPT_END.
    """

    gather: Gather
    window: int = 0
    pool: Pool = Pool.MEAN

    def __post_init__(self) -> None:
        if self.window < 1 and self.gather in (Gather.PROMPT_END, Gather.BELOW_UNIFORM):
            raise ValueError(f"Observation: {self.gather} needs a window of at least 1 token")
        if self.pool is Pool.MAX and self.gather is not Gather.PROMPT_END:
            raise ValueError(f"Observation: {self.pool} needs {Gather.PROMPT_END}")


class Keys(Enum):
    """Which keys a policy looks at.

    CACHED: as they lie in the cache, rotary embedding applied.
    BEFORE_ROTARY: rotated back by their position with the model's own table. A model whose keys
        cannot be rotated back is refused at start for a policy that needs this.
    """

    CACHED = "cached"
    BEFORE_ROTARY = "before rotary"


def _no_keys() -> Iterator[Tensor]:
    raise RuntimeError("this policy does not declare reads_keys, so its view has no keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """What a policy sees of one request. Valid only during the call; must not be written to.

    Fields:
        positions: int64 [n_live]. Logical positions of the live tokens, strictly ascending.
            Evicted tokens are absent; a position never changes, whatever moves in memory. On the
            CPU, or on the model's device for a policy that looks at keys or attention.
        logical_len: tokens the request has had so far, evicted ones included.
        request_seed: the request's seed, in [0, 2**63).
        attention: float32 [n_live], what the policy's `observation` asks for; zeros where nothing
            was observed yet; None for a policy that asks for nothing.
        observed_len: no observed query saw the tokens from this position on.
        layer_keys: for a policy that declares `reads_keys`: one float32 [n_live, kv_heads, dim] per
            layer, those that it declares, gathered from the cache when asked for.
        page_size: tokens of a page of the cache; told to policies that look at keys or attention.
    """

    positions: Tensor
    logical_len: int
    request_seed: int
    attention: Tensor | None = None
    observed_len: int = 0
    layer_keys: Callable[[], Iterator[Tensor]] = _no_keys
    page_size: int = 1


class Policy(ABC):
    """One instance serves every request of a process, so a policy keeps no per-request state.

    Its parameters are the fields of a dataclass with defaults; a policy without any needs none.
    """

    @property
    def reads_keys(self) -> Keys | None:
        """Which keys the view must hold; None unless overridden, a class attribute does."""
        return None

    def observation(self) -> Observation | None:
        """What of attention the view must hold; None (nothing is observed) unless overridden."""
        return None

    @abstractmethod
    def score(self, view: PolicyView) -> Tensor:
        """Importance of each live token; the lowest are evicted first, of equal ones the lower
        position.

        It must be deterministic: equal views give equal bits, in every process and on every rank,
        so no random draws but from `request_seed`, and no operation whose order of summation may
        change from call to call (on CUDA: `cumsum`, `index_add_`, `scatter_add_` of floats).
        For a policy that looks at keys or attention it runs on the model's device and must not
        read a tensor back (no `.item()`, no branch on a value): the host would wait.

        Returns:
            float32 [n_live], same device and order as `view.positions`, every value finite.
        """


def attention_or_best(view: PolicyView, kernel: int = 1) -> Tensor:
    """`view.attention`, averaged over `kernel` live neighbours, where a token that no observed
    query saw counts as much as the best one: it is too new to be judged. If nothing was observed at
    all, every token scores 0."""
    assert view.attention is not None, "the policy's observation() asks for none"
    smooth = neighbour_sum(view.attention, kernel) / kernel
    unseen = view.positions >= view.observed_len
    return torch.where(unseen, smooth.max(), smooth)


def ranks(scores: Tensor) -> Tensor:
    """Where each score stands among all, float32 [n] in [0, 1): 0 is the lowest. Equal scores rank
    by position, so ranks are distinct, and ranks of different policies may be added."""
    return scores.argsort(stable=True).argsort().float() / max(1, len(scores))


def neighbour_sum(values: Tensor, width: int) -> Tensor:
    """Sum over the `width` nearest entries along the first axis, itself included, as far as there
    are any. Doubling, so a wide sum costs log2(width) additions, in an order that never changes.

    Args:
        values: [n, ...], floating. width: odd.
    """
    count, reach = len(values), width // 2
    part = pad(values, (0, 0) * (values.dim() - 1) + (reach, reach))  # sums of `size` entries
    total, start, size = torch.zeros_like(values), 0, 1
    while size <= width:
        if width & size:
            total = total + part[start : start + count]
            start += size
        if 2 * size <= width:
            part = part[: len(part) - size] + part[size:]
        size *= 2
    return total


def check_width(name: str, width: int) -> None:
    """Raise ValueError unless a width over neighbours is odd, and small enough to be one."""
    if not 1 <= width <= MAX_WIDTH or width % 2 == 0:
        raise ValueError(f"{name} must be an odd number from 1 to {MAX_WIDTH}")
