"""From scores to evicted: how many tokens of a request die now, and which.

The number depends on host integers alone (`eviction_count`), the identity on the policy's scores,
so host and device agree on lengths without a synchronisation. Pure functions; nothing is marked
here. Positions are logical (`pos`), lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vtoken_sglang.options import RequestOptions
from vtoken_sglang.policy.base import Policy, PolicyError, PolicyView

_NONE_EVICTED = np.empty(0, dtype=np.int64)


def due(options: RequestOptions, last_len: int, logical_len: int) -> bool:
    """Whether it is time to look for evicted: `interval` tokens came since the last look.

    `last_len` is the logical length at that look, 0 before the first one (and again after a
    retraction), so a prompt of at least `interval` tokens is due at once.
    """
    return options.prunes and logical_len - last_len >= options.interval


def target_kept(options: RequestOptions, logical_len: int) -> int:
    """Live tokens the request should be left with: `budget`, or `keep` of the logical length,
    rounded up. `keep` is taken as the decimal it was written as: 0.1 of 30 tokens is 3, though
    the float product is above 3. Without pruning it is the logical length."""
    if not options.prunes:
        return logical_len
    if options.budget is not None:
        return options.budget
    assert options.keep is not None  # RequestOptions.resolve lets nothing else through
    return ceil(_as_written(options.keep) * logical_len)


def live_after_eviction(options: RequestOptions, logical_len: int) -> int:
    """Live tokens the request is left with: its target, and never less than is protected."""
    target = target_kept(options, logical_len)
    return max(target, options.sink + options.recent_of(target))


def eviction_count(options: RequestOptions, *, live: int, candidates: int, logical_len: int) -> int:
    """How many of `candidates` (tokens that may die) go when `live` tokens are held."""
    return min(candidates, max(0, live - target_kept(options, logical_len)))


def candidate_range(
    live_positions: NDArray[np.int64],
    *,
    logical_len: int,
    options: RequestOptions,
    eligible_below: int,
) -> tuple[int, int]:
    """Half-open index range into `live_positions` of the tokens that may die: not among the
    first `sink` or the last `recent` positions, and below `eligible_below`."""
    recent = options.recent_of(target_kept(options, logical_len))
    end = min(logical_len - recent, eligible_below)
    first, last = np.searchsorted(live_positions, (options.sink, end))
    return int(first), max(int(first), int(last))


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """How many tokens die and among which; host integers alone.

    Fields:
        positions: int64 [n_live], live positions, strictly ascending.
        first, last: half-open index range into them of the tokens that may die.
        count: how many of those die, at least 1.
    """

    positions: NDArray[np.int64]
    logical_len: int
    seed: int
    first: int
    last: int
    count: int

    def view(self, device: torch.device | None = None) -> PolicyView:
        """What every policy sees; `positions` is a copy, uploaded without waiting."""
        host = torch.from_numpy(np.array(self.positions, dtype=np.int64))
        if device is not None and device.type == "cuda":
            host = host.pin_memory().to(device, non_blocking=True)
        return PolicyView(positions=host, logical_len=self.logical_len, request_seed=self.seed)


def plan_eviction(
    live_positions: NDArray[np.int64],
    *,
    logical_len: int,
    options: RequestOptions,
    eligible_below: int,
) -> EvictionPlan | None:
    """How many tokens die now; None when nothing exceeds the target.

    Args:
        live_positions: int64 [n_live], strictly ascending, each in [0, logical_len).
        logical_len: tokens the request has had, dead ones included.
        eligible_below: first position that must stay whatever its score (the open tail page,
            tokens in flight, a page the request may not change).
    """
    first, last = candidate_range(
        live_positions, logical_len=logical_len, options=options, eligible_below=eligible_below
    )
    live = len(live_positions)
    count = eviction_count(options, live=live, candidates=last - first, logical_len=logical_len)
    if count == 0:
        return None
    assert live_positions[0] >= 0
    assert live_positions[-1] < logical_len
    assert bool((np.diff(live_positions) > 0).all())
    return EvictionPlan(live_positions, logical_len, options.seed, first, last, count)


def choose_evicted(
    policy: Policy,
    *,
    live_positions: NDArray[np.int64],
    logical_len: int,
    options: RequestOptions,
    eligible_below: int,
    see: Callable[[PolicyView], PolicyView] | None = None,
) -> NDArray[np.int64]:
    """Positions to eviction now: the lowest scores among the candidates, equal scores by lower
    position. Deterministic; the policy gets a copy of `live_positions`.

    Args:
        live_positions, logical_len, eligible_below: see `plan_eviction`.
        see: adds to the view what the policy asked for (keys, attention); called only if a token
            dies.

    Returns:
        int64 [n_evicted], strictly ascending; empty when nothing exceeds the target.

    Raises:
        PolicyError: the policy raised an error, or its scores have a wrong shape, dtype or a value
            that is not finite.
    """
    plan = plan_eviction(
        live_positions, logical_len=logical_len, options=options, eligible_below=eligible_below
    )
    if plan is None:
        return _NONE_EVICTED.copy()
    view = plan.view()
    scores = score_tokens(policy, view if see is None else see(view), plan)
    return check_selected(policy, lowest(scores, plan))


def score_tokens(policy: Policy, view: PolicyView, plan: EvictionPlan) -> Tensor:
    """The policy's scores of a plan's live tokens, float32 [n_live]; no value is read back.

    Raises:
        PolicyError: the policy raised an error, or its scores have a wrong shape, dtype, layout or
            device.
    """
    device = view.positions.device
    try:
        found = policy.score(view)
    except Exception as error:  # anybody's code: it must name itself, and only its request ends
        raise PolicyError(policy, "must be computed without an error", error) from error
    return _checked_scores(policy, found, len(plan.positions), device)


def lowest(scores: Tensor, plan: EvictionPlan) -> Tensor:
    """The plan's evicted tokens, decided where the scores are.

    Returns:
        int64 [1 + count]: how many scores are not finite, then the positions, ascending.
    """
    # The positions come from the plan: a policy may write to its view.
    positions = plan.view(scores.device).positions[plan.first : plan.last]
    # They ascend, so a stable order breaks ties by lower position.
    order = scores[plan.first : plan.last].sort(stable=True).indices
    evicted = positions[order[: plan.count]].sort().values
    bad = scores.isfinite().logical_not().sum(dtype=torch.int64)
    return torch.cat([bad[None], evicted])


def check_selected(policy: Policy, found: Tensor | NDArray[np.int64]) -> NDArray[np.int64]:
    """The evicted out of what `lowest` returned, once it is on the host.

    Raises:
        PolicyError: a score is not finite.
    """
    host = np.asarray(found)
    if host[0]:
        raise PolicyError(policy, "must be finite", f"{host[0]} that are not")
    evicted: NDArray[np.int64] = host[1:].copy()
    return evicted


@lru_cache(maxsize=256)
def _as_written(keep: float) -> Fraction:
    return Fraction(repr(keep))


def _checked_scores(policy: Policy, scores: object, live: int, device: torch.device) -> Tensor:
    if not isinstance(scores, Tensor):
        raise PolicyError(policy, "must be a tensor", type(scores).__name__)
    if scores.shape != (live,):
        raise PolicyError(policy, f"must have shape ({live},)", tuple(scores.shape))
    if scores.dtype != torch.float32:
        raise PolicyError(policy, "must be float32", scores.dtype)
    if scores.layout != torch.strided:
        raise PolicyError(policy, "must be a dense tensor", scores.layout)
    if scores.device != device:
        raise PolicyError(policy, f"must be on {device}", scores.device)
    return scores.detach()
