"""The watched lanes of one forward, and how a layer's weights reach the score table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vtoken_sglang.engine.observe.queries import Share
from vtoken_sglang.kernels.attention_mass.query_mass import add_query_mass
from vtoken_sglang.kernels.upload import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneShare:
    """Observed queries of one lane that go to one score row.

    Fields:
        share: which they are.
        rows: int64 [queries], their rows in the forward's `q`.
        sees: int64 [queries], how many of the lane's live keys each of them sees.
        mass: float32 [n_live], what they gave each live key in the layers so far.
    """

    share: Share
    rows: torch.Tensor
    sees: torch.Tensor
    mass: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneObservation:
    """One watched lane.

    Fields:
        lane: its index in the batch.
        positions: int64 [n_live], live positions, ascending, its own queries' included.
        slots: int64 [n_live], where their keys are in this forward.
        shares: one or more.
    """

    lane: int
    positions: torch.Tensor
    slots: torch.Tensor
    shares: tuple[LaneShare, ...]


def make_lane(
    row: torch.Tensor,
    live: NDArray[np.int64],
    shares: list[Share],
    *,
    lane: int,
    first_query: int,
    start: int,
) -> LaneObservation:
    """Lay out one lane.

    Args:
        row: the request's row, int32 [width].
        live: live positions, ascending.
        lane: its index in the batch.
        first_query: row of `q` that holds the lane's first query; start: that query's position.
    """
    device = row.device
    positions = upload(live, device)
    laid: list[LaneShare] = []
    for share in shares:
        queries = np.arange(share.queries.start, share.queries.stop, share.queries.step)
        laid.append(
            LaneShare(
                share=share,
                rows=upload(queries - start + first_query, device),
                sees=upload(np.searchsorted(live, queries, side="right"), device),
                mass=torch.zeros(len(live), device=device),
            )
        )
    return LaneObservation(
        lane=lane, positions=positions, slots=row[positions].long(), shares=tuple(laid)
    )


@dataclass(frozen=True, slots=True)
class ForwardObservation:
    """What one forward observes.

    Fields:
        lanes: the watched ones that have a query to observe.
    """

    lanes: list[LaneObservation]

    def add_layer(
        self, q: torch.Tensor, keys_of: Callable[[torch.Tensor], torch.Tensor], scale: float
    ) -> None:
        """Add one layer's weights to the lanes' sums.

        Args:
            q: [query tokens, q_heads, dim].
            keys_of: slots -> the layer's keys, [n, kv_heads, dim].
        """
        for lane in self.lanes:
            keys = keys_of(lane.slots)
            for part in lane.shares:
                if part.share.queries:
                    below_uniform = part.share.below_uniform
                    queries = q[part.rows]
                    add_query_mass(
                        queries,
                        keys,
                        part.sees,
                        part.mass,
                        scale=scale,
                        below_uniform=below_uniform,
                    )

    def add_weights(self, weights_of: Callable[[int], torch.Tensor]) -> None:
        """As `add_layer` for a decode step whose attention computed the weights itself.

        `weights_of(lane)`: float32 [q_heads, n_live].
        """
        for lane in self.lanes:
            for part in lane.shares:
                if part.share.queries:
                    weights = weights_of(lane.lane)
                    if part.share.below_uniform:
                        weights = (weights < 1.0 / weights.shape[1]).float()
                    part.mass.add_(weights.sum(dim=0))

    def add_to(self, scores: torch.Tensor) -> None:
        """Add the lanes' sums to the score table, float32 [rows, width]."""
        for lane in self.lanes:
            for part in lane.shares:
                row = scores[part.share.score_row]
                if part.share.clear:
                    row.zero_()
                row.index_add_(0, lane.positions, part.mass)
