"""Host lists on a device: same values, int64, whatever integers and strides they had."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vtoken_sglang.kernels.upload import upload


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_values_arrive_as_they_are(dtype: type[np.integer]) -> None:
    values = np.arange(12, dtype=dtype).reshape(3, 4)[:, ::2]
    for device in ("cpu", torch.device("cpu")):
        found = upload(values, device)
        assert (found.dtype, found.tolist()) == (torch.int64, values.tolist())
    assert upload(values[:0], "cpu").shape == (0, 2)


def test_cuda_reads_pinned_memory_and_the_host_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def to(tensor: torch.Tensor, device: str, *, non_blocking: bool = False) -> torch.Tensor:
        assert tensor is pinned[-1]
        assert (device, non_blocking) == ("cuda", True)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert upload(np.arange(3), "cuda").tolist() == [0, 1, 2]
