"""Keys as they were before rotary embedding, from what the cache holds of them.

Rotary embedding multiplies each pair of a key's numbers by a 2x2 matrix [[c, -s], [s, c]] that its
position names in the model's own table. The inverse divides by c*c + s*s, so it is exact for
whatever the table holds: scaled frequencies, a factor on all of it, a table in half precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from vtoken_sglang.errors import UnsupportedModeError

if TYPE_CHECKING:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

PLAIN = frozenset(
    {
        "DynamicNTKAlphaRotaryEmbedding",
        "DynamicNTKScalingRotaryEmbedding",
        "Gemma4RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
)
"""Classes whose table has one row per position, read by the position alone."""
NORM_AFTER = frozenset({"HunYuanAttention"})
"""Attention modules that normalise a key after they rotated it: that cannot be rotated back."""


class KeyRotation:
    """The rotary embedding of each layer of a model.

    Args:
        modules: by layer, None for a layer that does not rotate its keys.
    """

    def __init__(self, modules: list[RotaryEmbedding | None]) -> None:
        self._modules = modules

    def undo(self, layer_keys: Iterable[torch.Tensor], positions: torch.Tensor) -> Iterator[Any]:
        """Keys of each layer as they were before rotary embedding. Nothing is read back.

        Args:
            layer_keys: by layer, float32 [n, kv_heads, dim], as cached.
            positions: int64 [n], on their device.
        """
        tables: dict[int, torch.Tensor] = {}  # most models have one for all layers
        for module, keys in zip(self._modules, layer_keys, strict=True):
            if module is None:
                yield keys
                continue
            if id(module) not in tables:
                tables[id(module)] = inverse_table(module.cos_sin_cache[positions].float())
            yield rotate_back(keys, tables[id(module)], is_neox=module.is_neox_style)


def inverse_table(cos_sin: torch.Tensor) -> torch.Tensor:
    """What `rotate_back` multiplies with: float32 [n, width], cosines before sines, each over the
    sum of both squares."""
    halves = cos_sin.view(len(cos_sin), 2, -1)
    return (halves / halves.square().sum(dim=1, keepdim=True)).flatten(1)


def rotate_back(keys: torch.Tensor, table: torch.Tensor, *, is_neox: bool) -> torch.Tensor:
    """Undo rotary embedding.

    Args:
        keys: float32 [n, kv_heads, dim]; what lies beyond the rotated width stays as it is.
        table: float32 [n, rotated width], see `inverse_table`.
        is_neox: a pair is the same place in both halves of the rotated width, not two neighbours.
    """
    width = table.shape[-1]
    cos, sin = table[:, None].chunk(2, dim=-1)
    back = keys.clone()
    (first, second), (to_first, to_second) = (
        part[..., :width].chunk(2, dim=-1)
        if is_neox
        else (part[..., :width:2], part[..., 1:width:2])
        for part in (keys, back)
    )
    torch.mul(first, cos, out=to_first).addcmul_(second, sin)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=-1)
    return back


def key_rotation(model: torch.nn.Module, layers: int) -> KeyRotation:
    """How keys of `model` were rotated.

    Raises:
        UnsupportedModeError: they cannot be rotated back in some layer, with the reason.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found: dict[int, RotaryEmbedding | None] = {}
    for module in model.modules():
        for child in module.children():
            if isinstance(child, RadixAttention):
                found[child.layer_id] = _beside(module, child.layer_id)
    if len(found) != layers:
        raise _cannot(f"{len(found)} attention modules store keys for {layers} layers")
    return KeyRotation([found[layer] for layer in sorted(found)])


def key_rotation_or_reason(
    model: torch.nn.Module, layers: int, required: bool
) -> KeyRotation | UnsupportedModeError:
    """`key_rotation`, or why there is none, for the requests that ask for it. Raises that reason if
    the server's own policy needs it (`required`)."""
    try:
        return key_rotation(model, layers)
    except UnsupportedModeError as error:
        if required:
            raise
        return error


def _beside(module: torch.nn.Module, layer: int) -> RotaryEmbedding | None:
    """The rotary embedding of an attention module; None if it says that it has none."""
    name = type(module).__name__
    if name in NORM_AFTER:
        raise _cannot(f"{name} of layer {layer} normalises keys after it rotated them")
    rotary: list[RotaryEmbedding] = [
        child for child in module.children() if "rotary" in type(child).__name__.lower()
    ]
    if not rotary and getattr(module, "rotary_emb", module) is None:
        return None
    if len(rotary) != 1:
        raise _cannot(f"{name} of layer {layer} has {len(rotary)} rotary embeddings")
    if type(rotary[0]).__name__ not in PLAIN:
        raise _cannot(f"layer {layer} uses {type(rotary[0]).__name__}")
    return rotary[0]


def _cannot(problem: str) -> UnsupportedModeError:
    return UnsupportedModeError(
        "a policy that reads keys before rotary embedding",
        f"keys of this model cannot be rotated back: {problem}",
        "choose a policy that reads none, or cached keys (keydiff with rotary = true)",
    )
