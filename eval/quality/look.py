"""One look for evicted on the reference: the product's own policies and choice, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from vtoken_sglang.options import RequestOptions
from vtoken_sglang.policy.base import Observation, Policy, PolicyView
from vtoken_sglang.policy.eviction import choose_evicted, due
from vtoken_sglang.policy.registry import load_policy

from .reference import Lanes


def observations(options: RequestOptions) -> tuple[Observation, ...]:
    """What the request's policy must see of attention: one thing or nothing."""
    found = (
        load_policy(options.policy, options.policy_args).observation() if options.prunes else None
    )
    return () if found is None else (found,)


class Pruner:
    """EvictionPass for evicted in each lane when it is time to, as the engine's runtime does.

    Fields:
        evicted: per lane, (logical length at the look, positions that died), in order.
    """

    def __init__(self, lanes: Lanes, options: Sequence[RequestOptions], page_size: int = 1) -> None:
        self._lanes, self._options, self._page_size = lanes, list(options), page_size
        self._last_len = [0] * lanes.count
        self.evicted: list[list[tuple[int, list[int]]]] = [[] for _ in range(lanes.count)]

    def look(self) -> None:
        """EvictionPlan at every lane that is due."""
        logical_len = self._lanes.length
        for lane, options in enumerate(self._options):
            if due(options, self._last_len[lane], logical_len):
                self._last_len[lane] = logical_len
                self._look_at(lane, options, logical_len)

    def _look_at(self, lane: int, options: RequestOptions, logical_len: int) -> None:
        policy = load_policy(options.policy, options.policy_args)
        live = self._lanes.alive[lane, :logical_len].nonzero()[:, 0]
        evicted = choose_evicted(
            policy,
            live_positions=live.numpy(),
            logical_len=logical_len,
            options=options,
            eligible_below=(logical_len - 1) // self._page_size * self._page_size,
            see=lambda view: self._see(lane, policy, view),
        )
        if evicted.size:
            self._lanes.alive[lane, torch.from_numpy(evicted)] = False
            self.evicted[lane].append((logical_len, evicted.tolist()))

    def _see(self, lane: int, policy: Policy, view: PolicyView) -> PolicyView:
        if policy.reads_keys:
            positions = view.positions
            view = replace(view, layer_keys=lambda: self._lanes.keys_of(lane, positions))
        observation = policy.observation()
        if observation is None:
            return view
        (part,) = [part for part in self._lanes.gathered if part.observation == observation]
        attention = part.values(lane)[view.positions]
        unseen = view.positions >= part.observed_len
        return replace(
            view,
            attention=attention.masked_fill(unseen, 0.0),
            observed_len=part.observed_len,
        )

    def live(self) -> np.ndarray:
        """Live tokens of each lane, int64 [lanes]."""
        counts: np.ndarray = self._lanes.alive[:, : self._lanes.length].sum(dim=1).numpy()
        return counts
