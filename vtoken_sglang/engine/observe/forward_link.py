"""How the attention backend finds what to observe: the forward's plan carries it.

`KVLocPlan` is made per forward and reaches the backend in every mode, so what was prepared for a
forward is kept under its plan and goes when the plan goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

from vtoken_sglang.engine.observe.lanes import ForwardObservation
from vtoken_sglang.engine.observe.observer import Observer
from vtoken_sglang.kernels.cpu.decode import LaneWeights

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, slots=True)
class LayerObserver:
    """What each layer of one forward shows to the observer."""

    observer: Observer
    forward: ForwardObservation

    def show(self, layer_id: int, q: torch.Tensor, scale: float) -> None:
        """Queries, [tokens, q_heads, dim], and the factor on q.k; the keys are in the pool."""
        self.observer.on_layer(self.forward, layer_id, q, scale)

    def weights_seen(self, layer_id: int, q_heads: int) -> Callable[[LaneWeights], None] | None:
        """What a decode shows its weights to; None for a layer that is not observed."""
        if layer_id not in self.observer.layers:
            return None

        def seen(weights: LaneWeights) -> None:
            self.observer.on_weights(self.forward, layer_id, q_heads, weights.of)

        return seen


_observed: weakref.WeakKeyDictionary[KVLocPlan, LayerObserver] = weakref.WeakKeyDictionary()


def attach(plan: KVLocPlan, observer: Observer, forward: ForwardObservation) -> None:
    """Let the layers of the forward planned by `plan` show what they see to `observer`."""
    _observed[plan] = LayerObserver(observer, forward)


def layer_observer(forward_batch: ForwardBatch) -> LayerObserver | None:
    """What each layer of this forward calls; None if nothing of it is observed."""
    if not _observed:
        return None
    plan: KVLocPlan | None = getattr(forward_batch, "kv_loc_plan", None)
    return None if plan is None else _observed.get(plan)
