"""Attention matrices and keys of the plain model, under the evictions a server traced."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from .policy_reference import Observed

Evictions = Mapping[int, Collection[int]]
"""Query position -> key positions that this query and every later one no longer see."""


def visible_keys(length: int, evictions: Evictions) -> Tensor:
    """Which keys each query sees, bool [length, length] by (query, key): causal, less the
    evictions."""
    visible = torch.tril(torch.ones(length, length, dtype=torch.bool))
    for query, dead in evictions.items():
        visible[query:, list(dead)] = False
    return visible


class EagerReference:
    """One model in float32 whose attention weights can be seen."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @classmethod
    def load(cls, folder: Path) -> EagerReference:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attn_implementation="eager"
        )
        return cls(model)

    def observe(
        self,
        ids: Sequence[int],
        evictions: Evictions,
        *,
        first_query: int,
        last_chunk: tuple[int, int],
        layers: Sequence[int] | None = None,
        every: int = 1,
        page_size: int = 1,
    ) -> Observed:
        """One pass over `ids` with the evicted pairs masked; `layers`: those observed, all by
        default. The rest: see `Observed`."""
        visible = visible_keys(len(ids), evictions)
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        plain_keys: list[Tensor] = []
        with torch.inference_mode(), self._keys_before_rotary(plain_keys):
            answer = self.model(
                input_ids=torch.tensor([list(ids)]),
                attention_mask=mask[None, None],
                position_ids=torch.arange(len(ids))[None],
                use_cache=True,
                output_attentions=True,
            )
        chosen = range(len(answer.attentions)) if layers is None else layers
        weights = torch.stack([answer.attentions[layer][0] for layer in chosen])
        keys = [layer.keys[0].transpose(0, 1) for layer in answer.past_key_values.layers]
        return Observed(
            weights=weights,
            visible=visible,
            keys=keys,
            plain_keys=[found.view(keys[0].shape) for found in plain_keys],
            first_query=first_query,
            last_chunk=last_chunk,
            every=every,
            page_size=page_size,
        )

    @contextmanager
    def _keys_before_rotary(self, found: list[Tensor]) -> Iterator[None]:
        """While in force, each layer appends its keys as they go into rotary embedding."""
        modules = [layer.self_attn for layer in self.model.model.layers]
        handles = [
            getattr(module, "k_norm", module.k_proj).register_forward_hook(
                lambda module, inputs, output: found.append(output[0])
            )
            for module in modules
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True, slots=True)
class Choice:
    """Which tokens must die, and how clear that is.

    Fields:
        evicted: positions, ascending. scores: float64, by position.
        candidates: positions that could have died.
    """

    evicted: list[int]
    scores: Tensor
    candidates: list[int]


def expected_evicted(
    scores: Tensor,
    live: Sequence[int],
    *,
    length: int,
    kept: int,
    sink: int,
    recent: int,
    page_size: int,
    eligible_below: int | None = None,
) -> Choice:
    """The lowest scores among the tokens that may die, so that `kept` are left if possible.

    `eligible_below`: first position that must stay, by default that of the last token's page; its
    page is spared as a whole.
    """
    below = length - 1 if eligible_below is None else eligible_below
    end = min(length - recent, below // page_size * page_size)
    candidates = [pos for pos in live if sink <= pos < end]
    count = min(len(candidates), max(0, len(live) - kept))
    order = sorted(candidates, key=lambda pos: (float(scores[pos]), pos))
    return Choice(sorted(order[:count]), scores, candidates)


def unexplained(choice: Choice, evicted: Sequence[int], tolerance: float) -> list[str]:
    """How `evicted` differs from the choice beyond a tie: tokens swapped for one another must have
    scores within `tolerance`. Empty when they agree."""
    expected = set(choice.evicted)
    spared, extra = expected - set(evicted), set(evicted) - expected
    if len(evicted) != len(expected):
        return [f"{len(evicted)} died, not {len(expected)}"]
    if not set(evicted) <= set(choice.candidates):
        return [f"{sorted(set(evicted) - set(choice.candidates))} may not die"]
    if not spared:
        return []
    gap = max(float(choice.scores[pos]) for pos in extra)
    gap -= min(float(choice.scores[pos]) for pos in spared)
    if gap <= tolerance:
        return []
    return [f"{sorted(extra)} died instead of {sorted(spared)}, scores {gap:.2e} apart"]
