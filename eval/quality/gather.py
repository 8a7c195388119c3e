"""What a policy sees of attention, gathered by the definitions of `vtoken_sglang.policy.base`.

The reference computes every weight explicitly, so this is a plain sum over weights; the engine
gets the same numbers from its attention backend. Lanes are sequences that run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vtoken_sglang.policy.base import Gather, Observation, Pool


class Gathered:
    """Attention that the keys of some lanes received, for one observation.

    Fields:
        lanes: int64 [n], the lanes it is gathered for.
        sums: block of query positions -> float32 [n, capacity]; only BELOW_UNIFORM has several
            blocks.
        observed_len: no observed query saw the tokens from here on: one past the last observed
            query, or where the window at the end of the prompt begins.
    """

    def __init__(self, observation: Observation, lanes: Tensor, capacity: int, prompt: int) -> None:
        self.observation, self.lanes = observation, lanes
        self._capacity, self._prompt = capacity, prompt
        self.sums: dict[int, Tensor] = {}
        self.observed_len = 0
        self._heads: dict[int, Tensor] = {}  # layer -> [n, heads, capacity], MAX alone

    def add(self, layer: int, weights: Tensor, visible: Tensor, first: int, layers: int) -> None:
        """Take in one layer's weights for consecutive queries.

        Args:
            layer: its number.
            weights: float32 [n, heads, queries, keys], of this object's lanes.
            visible: bool [n, queries, keys].
            first: position of the first query.
            layers: how many layers are averaged.
        """
        kind, window = self.observation.gather, self.observation.window
        queries = weights.shape[2]
        if kind is Gather.BELOW_UNIFORM:
            share = 1 / visible.sum(-1, dtype=weights.dtype)
            begin = 0
            while begin < queries:
                block = (first + begin) // window
                end = min(queries, (block + 1) * window - first)
                seen = visible[:, begin:end]
                rare = weights[:, :, begin:end] < share[:, None, begin:end, None]
                rare &= seen[:, None]
                self._sum(block).add_(_padded(rare, self._capacity), alpha=_mean(weights, layers))
                begin = end
            return
        if kind is Gather.LAST:
            weights = weights[:, :, -1:]
            target = self._sum(first + queries - 1)
        elif kind is Gather.PROMPT_END:
            begin = min(max(self._prompt - window - first, 0), queries)
            end = min(max(self._prompt - first, 0), queries)
            if begin == end:
                return
            if self.observation.pool is Pool.MAX:
                self._heads[layer] = self._heads.get(layer, 0) + _padded(
                    weights[:, :, begin:end], self._capacity, dim=2
                )
                return
            weights = weights[:, :, begin:end]
            target = self._sum(0)
        else:
            target = self._sum(0)
        target.add_(_padded(weights, self._capacity), alpha=_mean(weights, layers))

    def finish(self, length: int) -> None:
        """All layers of the queries below position `length` were taken in."""
        kind, window = self.observation.gather, self.observation.window
        if kind is Gather.LAST:
            self._keep({length - 1})
        elif kind is Gather.BELOW_UNIFORM:
            block = (length - 1) // window
            self._keep({block, block - 1})
        self.observed_len = length
        if kind is Gather.PROMPT_END:
            # The window itself counts as unseen: its queries saw it only in part.
            self.observed_len = max(0, self._prompt - window) if length >= self._prompt else 0
            if self._heads and length >= self._prompt:
                largest = torch.stack([heads.amax(dim=1) for heads in self._heads.values()])
                self._sum(0).add_(largest.mean(dim=0))
                self._heads = {}

    def values(self, lane: int) -> Tensor:
        """What lane `lane` gathered, float32 [capacity]; zeros where nothing was."""
        at = int((self.lanes == lane).nonzero()[0])
        return sum((part[at] for part in self.sums.values()), torch.zeros(self._capacity))

    def fork(self, lanes: Tensor, capacity: int, prompt: int) -> Gathered:
        """A copy of this one-lane record for each of `lanes`."""
        copy = Gathered(self.observation, lanes, capacity, prompt)
        copy.observed_len = self.observed_len
        for block, part in self.sums.items():
            copy._sum(block)[:, : part.shape[1]] = part
        assert not self._heads, "forked within the window at the prompt's end"
        return copy

    def _sum(self, block: int) -> Tensor:
        if block not in self.sums:
            self.sums[block] = torch.zeros(len(self.lanes), self._capacity)
        return self.sums[block]

    def _keep(self, blocks: set[int]) -> None:
        self.sums = {block: part for block, part in self.sums.items() if block in blocks}


def gather_for(
    wanted: Sequence[Sequence[Observation]], capacity: int, prompt: int
) -> list[Gathered]:
    """One record per distinct observation; `wanted` holds those of each lane."""
    distinct = dict.fromkeys(item for items in wanted for item in items)
    return [
        Gathered(
            item,
            torch.tensor([lane for lane, items in enumerate(wanted) if item in items]),
            capacity,
            prompt,
        )
        for item in distinct
    ]


def _mean(weights: Tensor, layers: int) -> float:
    return 1 / (weights.shape[1] * layers)


def _padded(weights: Tensor, capacity: int, dim: int | tuple[int, ...] = (1, 2)) -> Tensor:
    """[n, heads, queries, keys] -> float32 [n, capacity], summed over heads and queries."""
    summed = weights.sum(dim=dim, dtype=torch.float32)
    return torch.nn.functional.pad(summed, (0, capacity - summed.shape[-1]))
