"""Host lists to the device, without the host waiting for it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def upload(values: NDArray[np.integer], device: torch.device | str) -> torch.Tensor:
    """`values` as an int64 tensor of the same shape on `device`, in the order of its stream.

    From pageable memory CUDA first waits for all that the stream holds, which after a launch is a
    whole forward; pinned memory is read when the stream gets there, and PyTorch keeps it until
    then. On the CPU the tensor may share the array's memory.
    """
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if torch.device(device).type == "cuda":
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)
