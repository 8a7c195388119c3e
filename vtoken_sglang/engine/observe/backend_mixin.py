"""How SGLang's FlashInfer and Triton backends show their queries: a mixin, put first.

Extend is observed after the stock call, from q and the keys it stored, by plain matrix products
(`kernels.query_mass`). Decode is observed by `observation_tap`, eagerly where a lane is watched and
always in a captured graph; the log-sum-exp comes from the stock kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

from vtoken_sglang.engine.observe.decode_tap import DecodeTap, make_tap
from vtoken_sglang.engine.observe.forward_link import layer_observer
from vtoken_sglang.engine.observe.observer import observed_layers
from vtoken_sglang.options import from_environment

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class LseKept:
    """A FlashInfer wrapper whose `forward` keeps the log-sum-exp of its call.

    Fields:
        lse: float32 [tokens, q_heads], base 2 as FlashInfer gives it; None before a call.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.lse: torch.Tensor | None = None

    def forward(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """The wrapper's attention; the log-sum-exp is kept."""
        out: torch.Tensor
        out, self.lse = self._wrapper.forward_return_lse(*arguments, **options)
        return out


class AttentionTap:
    """Mixin. Call `make_decode_tap` once the stock constructor has run.

    Fields:
        tap: None where nothing can be asked for.
    """

    tap: DecodeTap | None = None

    def make_decode_tap(self, model_runner: ModelRunner) -> None:
        """Allocate what captured graphs need, if this server has a policy at all."""
        config = from_environment()
        if config is None or not config.prunes:
            return
        keys = model_runner.token_to_kv_pool.k_buffer
        layers = observed_layers(config.observe_layers, len(keys))
        if not layers:
            return
        rows = model_runner.req_to_token_pool.req_to_token
        self.tap = make_tap(rows, len(keys[0]), layers)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Stock extend; then its queries are shown to whoever gathers attention."""
        out: torch.Tensor = super().forward_extend(  # type: ignore[misc]
            q, k, v, layer, forward_batch, save_kv_cache, **options
        )
        observe = layer_observer(forward_batch)
        if observe is not None:
            observe.show(layer.layer_id, _queries(q, layer), _scale(layer))
        return out

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Stock decode; then the watched lanes' weights are added to their scores."""
        arguments = (q, k, v, layer, forward_batch, save_kv_cache)
        tap = self.tap
        if tap is None or layer.layer_id not in tap.layers:
            return self._stock_decode(*arguments, **options)
        if not tap.active and not get_is_capture_mode():
            return self._stock_decode(*arguments, **options)
        out, lse = self._decode_with_lse(*arguments, **options)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)  # type: ignore[attr-defined]
        tap.on_layer(_queries(q, layer), keys, lse, _scale(layer))
        return out

    def _stock_decode(self, *arguments: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = super().forward_decode(*arguments, **options)  # type: ignore[misc]
        return out

    def _decode_with_lse(
        self, *arguments: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stock decode and the natural log-sum-exp of its softmax, float32 [bs, q_heads]."""
        raise NotImplementedError


def flashinfer_lse(backend: Any, decode: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `decode()` with the backend's decode wrapper keeping its log-sum-exp."""
    wrappers = backend.forward_metadata.decode_wrappers
    stock = wrappers[0]
    kept = wrappers[0] = LseKept(stock)
    try:
        out = decode()
    finally:
        wrappers[0] = stock
    assert kept.lse is not None, "the stock decode did not call its wrapper"
    return out, kept.lse * math.log(2)


def triton_lse(backend: Any, count: int, decode: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `decode()` of `count` lanes and join the log-sum-exps that its splits leave behind.

    Splits that a lane does not use are not written, so all are set to minus infinity first.
    """
    splits: torch.Tensor = backend.forward_metadata.attn_lse[:count]
    splits.fill_(float("-inf"))
    out = decode()
    return out, splits.logsumexp(dim=-1)


def _queries(q: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
    return q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)


def _scale(layer: RadixAttention) -> float:
    """Factor on q.k, with the scale that quantised keys were divided by."""
    k_scale = getattr(layer, "k_scale_float", None)
    return float(layer.scaling) * (1.0 if k_scale is None else float(k_scale))
