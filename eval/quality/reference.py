"""The reference: a transformers model whose attention sees exactly the tokens that are alive.

A evicted token is one that no later query sees, while everything computed before the eviction
stays. That is what pruning does to a cache, and the served tests hold the engine to the same rule.
Lanes share the keys and values of a common prefix, so one prompt is computed once for every policy.
float32 on the CPU; positions are never renumbered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vtoken_sglang.policy.base import Observation

from .gather import Gathered, gather_for

ATTENTION = "vtoken_reference"
QUERY_BLOCK = 256  # bounds the memory of one layer's weights


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's attention."""

    layers: int
    kv_heads: int
    head_dim: int


class ReferenceModel:
    """A causal language model of the Llama family (grouped keys, full attention, no bias terms)."""

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _attention)
        model.set_attn_implementation(ATTENTION)
        self.model = model.eval()
        config = model.config
        head_dim = getattr(config, "head_dim", None)
        self.shape = Shape(
            config.num_hidden_layers,
            config.num_key_value_heads,
            head_dim or config.hidden_size // config.num_attention_heads,
        )

    def rotate_back(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Undo rotary embedding of float32 [n, kv_heads, dim] keys: the opposite turn."""
        with torch.inference_mode():
            cos, sin = self.model.model.rotary_emb(keys, positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        first, second = keys.chunk(2, dim=-1)
        turned = keys * cos - torch.cat([-second, first], dim=-1) * sin
        return turned / (cos * cos + sin * sin)

    @classmethod
    def load(cls, folder: Path) -> ReferenceModel:
        """Load a local model folder; raises what transformers raises when it is not one."""
        from transformers import AutoModelForCausalLM

        return cls(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        )


class Lanes:
    """Sequences that run side by side over a shared prefix.

    Fields:
        length: tokens each lane has had, dead ones included.
        alive: bool [lanes, capacity]; what a query sees is alive and not after it.
    """

    def __init__(
        self,
        model: ReferenceModel,
        observed: Sequence[Sequence[Observation]],
        capacity: int,
        prompt: int,
    ) -> None:
        """Empty lanes, one per entry of `observed` (what is gathered of the lane's attention).

        Args:
            capacity: most tokens a lane will have. prompt: length of the prompt, which ends the
                window that PROMPT_END gathers over.
        """
        shape = model.shape
        self._model = model
        self.count, self.capacity, self.length = len(observed), capacity, 0
        self.observed = observed
        self.alive = torch.ones(self.count, capacity, dtype=torch.bool)
        self.gathered = gather_for(observed, capacity, prompt)
        empty = torch.zeros(shape.kv_heads, 0, shape.head_dim)
        self._shared: list[tuple[Tensor, Tensor]] = [(empty, empty)] * shape.layers
        own = torch.zeros(self.count, shape.kv_heads, 0, shape.head_dim)
        self._own: list[tuple[Tensor, Tensor]] = [(own, own)] * shape.layers

    @property
    def shared_len(self) -> int:
        return int(self._shared[0][0].shape[1])

    def fork(self, observed: Sequence[Sequence[Observation]], capacity: int, prompt: int) -> Lanes:
        """New lanes that continue a single one. Raises ValueError for several lanes, or when an
        observation was not gathered so far."""
        if self.count != 1:
            raise ValueError(f"lanes: only a single lane can be forked, got {self.count}")
        copy = Lanes(self._model, observed, capacity, prompt)
        copy.length = self.length
        copy.alive[:, : self.length] = self.alive[0, : self.length]
        before = {part.observation: part for part in self.gathered}
        if missing := {part.observation for part in copy.gathered} - before.keys():
            raise ValueError(f"observations: not gathered from the start: {missing}")
        copy.gathered = [
            before[part.observation].fork(part.lanes, capacity, prompt) for part in copy.gathered
        ]
        copy._shared = [
            (torch.cat([keys, own_keys[0]], dim=1), torch.cat([values, own_values[0]], dim=1))
            for (keys, values), (own_keys, own_values) in zip(self._shared, self._own, strict=True)
        ]
        return copy

    def feed(self, token_ids: Tensor) -> Tensor:
        """Append int64 [lanes, n] tokens and return what the model makes of them, the hidden
        states float32 [lanes, n, width] that `logits` takes."""
        first, self.length = self.length, self.length + token_ids.shape[1]
        if self.length > self.capacity:
            raise ValueError(f"lanes: capacity {self.capacity} is too small for {self.length}")
        positions = torch.arange(first, self.length)[None].expand(self.count, -1)
        with torch.inference_mode():
            hidden: Tensor = self._model.model.model(
                input_ids=token_ids, position_ids=positions, use_cache=False, lanes=self
            ).last_hidden_state
        for part in self.gathered:
            part.finish(self.length)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., width] -> logits [..., vocabulary]."""
        with torch.inference_mode():
            found: Tensor = self._model.model.lm_head(hidden)
        return found

    def keys_of(
        self, lane: int, positions: Tensor, *, before_rotary: bool = False
    ) -> Iterator[Tensor]:
        """Keys of a lane at int64 [n] ascending positions, float32 [n, kv_heads, dim] per layer,
        with rotary embedding or without."""
        for (shared, _), (own, _) in zip(self._shared, self._own, strict=True):
            keys = torch.cat([shared, own[lane]], dim=1)[:, positions].transpose(0, 1)
            yield self._model.rotate_back(keys, positions) if before_rotary else keys

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """One layer's attention for the tokens being fed.

        Args:
            query: [lanes, heads, n, dim]; key, value: [lanes, kv_heads, n, dim].

        Returns:
            [lanes, n, heads, dim].
        """
        own_keys = torch.cat([self._own[layer][0], key], dim=2)
        own_values = torch.cat([self._own[layer][1], value], dim=2)
        self._own[layer] = (own_keys, own_values)
        shared_keys, shared_values = self._shared[layer]
        count, parts = query.shape[2], []
        for begin in range(0, count, QUERY_BLOCK):
            end = min(count, begin + QUERY_BLOCK)
            first = self.length - count + begin
            visible = self._visible(first, end - begin)
            seen = visible.shape[2] - shared_keys.shape[1]  # keys after the block are not needed
            block_keys, block_values = own_keys[:, :, :seen], own_values[:, :, :seen]
            block = query[:, :, begin:end] * scale
            scores = _scores(block, shared_keys, block_keys)
            scores.masked_fill_(~visible[None, :, None], -torch.inf)
            weights = scores.softmax(dim=-1)
            for part in self.gathered:
                self._gather(part, layer, weights, visible, first)
            parts.append(_weighted(weights, shared_values, block_values))
        return torch.cat(parts, dim=1)

    def _visible(self, first: int, queries: int) -> Tensor:
        """Which keys up to the last of them the queries from position `first` on see, bool
        [lanes, queries, first + queries]."""
        end = first + queries
        causal = torch.arange(end)[None] <= torch.arange(first, end)[:, None]
        return self.alive[:, None, :end] & causal

    def _gather(
        self, part: Gathered, layer: int, weights: Tensor, visible: Tensor, first: int
    ) -> None:
        chosen = weights[:, part.lanes].movedim(0, 1).flatten(1, 2)  # [n, heads, queries, keys]
        part.add(layer, chosen, visible[part.lanes], first, self._model.shape.layers)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; the lanes travel as an extra argument."""
    lanes: Lanes = options["lanes"]
    return lanes.attend(module.layer_idx, query, key, value, options["scaling"]), None


def _scores(query: Tensor, shared: Tensor, own: Tensor) -> Tensor:
    """[lanes, heads, n, dim] against both parts of the keys -> [kv_heads, lanes, group, n, keys].

    Key heads come first, so that the prefix's keys are read once for all lanes.
    """
    lanes, heads, count, dim = query.shape
    kv_heads = own.shape[1]
    grouped = query.reshape(lanes, kv_heads, -1, dim).transpose(0, 1).contiguous()
    parts = [grouped @ own.transpose(0, 1).transpose(2, 3)]
    if shared.shape[1]:
        scores = grouped.view(kv_heads, -1, dim) @ shared.transpose(1, 2)
        parts.insert(0, scores.view(kv_heads, lanes, -1, shared.shape[1]))
    return torch.cat(parts, dim=-1).view(kv_heads, lanes, heads // kv_heads, count, -1)


def _weighted(weights: Tensor, shared: Tensor, own: Tensor) -> Tensor:
    """[kv_heads, lanes, group, n, keys] times the values -> [lanes, n, heads, dim]."""
    kv_heads, lanes, group, count, keys = weights.shape
    length, dim = shared.shape[1], own.shape[3]
    flat = weights.view(kv_heads, lanes, group * count, keys)
    summed = flat[..., length:] @ own.transpose(0, 1)
    if length:
        rows = flat.view(kv_heads, -1, keys)[..., :length] @ shared
        summed += rows.view(summed.shape)
    ordered = summed.view(kv_heads, lanes, group, count, dim).permute(1, 3, 0, 2, 4)
    return ordered.reshape(lanes, count, kv_heads * group, dim)
