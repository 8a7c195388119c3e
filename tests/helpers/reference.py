"""What the model itself says: greedy tokens and log-probabilities from transformers, in float32.

The masked functions are the oracle for token eviction. A evicted token is one that no later query
may see, while everything computed before the eviction stays as it was: exactly what a cache entry
does that is dropped between two steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Evictions = Mapping[int, Collection[int]]
"""Query position -> key positions that this query and every later one no longer see."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A greedy continuation.

    Fields:
        tokens: n generated token ids.
        logprobs: n natural-log probabilities, one per generated token.
        margins: n gaps, log-probability of the best token minus that of the second best; a tiny
            gap explains a difference between two engines, a wide one does not.
    """

    tokens: list[int]
    logprobs: list[float]
    margins: list[float]


def visible_keys(length: int, evictions: Evictions | None = None) -> torch.Tensor:
    """Return which keys each query sees, bool [length, length] by (query pos, key pos).

    Causal, minus the evictions. A query always sees itself: evicting a position at or after the
    query itself is an error (ValueError), since nothing can be dropped before it exists.
    """
    visible = torch.tril(torch.ones(length, length, dtype=torch.bool))
    for query, positions in (evictions or {}).items():
        for pos in positions:
            if not 0 <= pos < query:
                raise ValueError(
                    f"eviction at query {query}: position must be in [0, {query}), {pos}"
                )
            visible[query:, pos] = False
    return visible


class Reference:
    """One model in float32 on the CPU. `eos_token_ids` are not treated specially: no early stop."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, folder: Path) -> Reference:
        """Load a local model folder; raises what transformers raises when it is not one."""
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
        )
        return cls(model, AutoTokenizer.from_pretrained(folder, local_files_only=True))

    def greedy(
        self, prompt: Sequence[int], count: int, evictions: Evictions | None = None
    ) -> Continuation:
        """Generate `count` tokens greedily after `prompt`, step by step over a growing cache.

        Evictions at query positions inside the prompt act during its prefill.
        """
        total = len(prompt) + count
        visible = visible_keys(total, evictions)
        tokens: list[int] = []
        logprobs: list[float] = []
        margins: list[float] = []
        fed, cache, start = list(prompt), None, 0
        with torch.inference_mode():
            for _ in range(count):
                end = start + len(fed)
                answer = self.model(
                    input_ids=torch.tensor([fed]),
                    attention_mask=_additive(visible[start:end, :end]),
                    position_ids=torch.arange(start, end)[None],
                    past_key_values=cache,
                    use_cache=True,
                )
                best = torch.log_softmax(answer.logits[0, -1].float(), dim=-1).topk(2)
                tokens.append(int(best.indices[0]))
                logprobs.append(float(best.values[0]))
                margins.append(float(best.values[0] - best.values[1]))
                fed, cache, start = [tokens[-1]], answer.past_key_values, end
        return Continuation(tokens, logprobs, margins)

    def best_continuation(self, prompt: Sequence[int], tokens: Sequence[int]) -> Continuation:
        """Say in one pass what greedy decoding picks at each step of `tokens` after `prompt`.

        Step i is computed after tokens[:i], whatever those are: `tokens` is the greedy
        continuation exactly when it equals the returned tokens. Many times faster than `greedy`.
        """
        rows = self.forward([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        best = rows.topk(2, dim=-1)
        gaps = best.values[:, 0] - best.values[:, 1]
        return Continuation(best.indices[:, 0].tolist(), best.values[:, 0].tolist(), gaps.tolist())

    def forward(self, ids: Sequence[int], visible: torch.Tensor | None = None) -> torch.Tensor:
        """Return log-probabilities after each position in one pass, float32 [len(ids), vocabulary].

        `visible` is bool [len(ids), len(ids)] by (query pos, key pos), all causal keys by default.
        """
        mask = visible_keys(len(ids)) if visible is None else visible
        with torch.inference_mode():
            answer = self.model(
                input_ids=torch.tensor([list(ids)]),
                attention_mask=_additive(mask),
                position_ids=torch.arange(len(ids))[None],
                use_cache=False,
            )
        return torch.log_softmax(answer.logits[0].float(), dim=-1)


def _additive(visible: torch.Tensor) -> torch.Tensor:
    """bool [queries, keys] -> float32 [1, 1, queries, keys]: 0 where seen, else the minimum."""
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    return mask[None, None]
