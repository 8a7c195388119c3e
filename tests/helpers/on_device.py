"""Tensors that stand in for ones on a GPU: whatever would make the host wait raises.

A result of any operation on such a tensor is one again. Reading a value back, or asking for a shape
that depends on values, is what synchronises on CUDA.
"""

from __future__ import annotations

from typing import Any

import torch


class HostReadError(AssertionError):
    """A device tensor was read on the host."""


_READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
    "unique_consecutive",
    "equal",
    "allclose",
    "is_nonzero",
    "bincount",
}
_INDEXING = {"__getitem__", "__setitem__", "index_put_", "index_put"}


class OnDevice(torch.Tensor):
    """A CPU tensor that behaves as if it were on a GPU. Make one with `on_device`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise HostReadError(f"Tensor.{name} makes the host wait")
        if name == "to" and "cpu" in [str(value) for value in (*args[1:], *kwargs.values())]:
            raise HostReadError("Tensor.to('cpu') makes the host wait")
        if name in _INDEXING and any(_is_mask(index) for index in _flatten(args[1])):
            raise HostReadError(f"{name} with a mask makes the host wait: it counts the entries")
        if name == "repeat_interleave" and "output_size" not in kwargs and _is_tensor(args, kwargs):
            raise HostReadError("repeat_interleave without output_size makes the host wait")
        return super().__torch_function__(func, types, args, kwargs)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a stand-in for a device tensor."""
    return tensor.as_subclass(OnDevice)


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The values, for a test that looks at them; or what a kernel launch sees."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _is_tensor(args: Any, kwargs: dict[str, Any]) -> bool:
    repeats = args[1] if len(args) > 1 else kwargs.get("repeats")
    return isinstance(repeats, torch.Tensor)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _flatten(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple | list) else [index]
