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
