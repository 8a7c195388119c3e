"""Reads and writes of the engine's `req_to_token` rows, batched, on the caller's stream.

Only the scheduler thread calls this, at the safe point between two forwards (DESIGN: rows, counts
and ledger change together). On a CUDA device a read waits for the current stream.
"""

from typing import Any, Protocol

import numpy as np
import torch

from vtoken_sglang.core.types import Int32Array, Int64Array, IntArray, Row
from vtoken_sglang.errors import InvariantError
from vtoken_sglang.kernels.apply_moves import apply_moves
from vtoken_sglang.kernels.upload import upload


class DeviceEvent(Protocol):
    """The part of a CUDA event that is used."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class LateRead:
    """Row entries on their way to the host.

    `values`: int32, where they arrive. `event`: passes when they have; None if they are there.
    """

    def __init__(self, values: torch.Tensor, event: DeviceEvent | None) -> None:
        self._values, self._event = values, event

    def ready(self) -> bool:
        """Whether `values` would not wait."""
        return self._event is None or self._event.query()

    def values(self) -> Int64Array:
        """The entries, in the order they were asked for; waits for them."""
        if self._event is not None:
            self._event.synchronize()
        host: Int64Array = self._values.numpy().astype(np.int64)
        return host


class RequestRows:
    """The engine's row table.

    Fields:
        tensor: int32 [num_rows, width], the engine's own tensor; 0 = dead or never used.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise InvariantError(f"rows: int32 [num_rows, width], got {got}")
        self.tensor = tensor
        self._host: Int32Array | None = tensor.numpy() if tensor.device.type == "cpu" else None

    def __len__(self) -> int:
        return self.tensor.shape[0]

    @property
    def on_host(self) -> bool:
        """Whether reading is a plain memory access."""
        return self._host is not None

    @property
    def width(self) -> int:
        """Positions a row can hold."""
        return self.tensor.shape[1]

    def read(self, row: Row, start: int, end: int, step: int = 1) -> Int64Array:
        """Entries [start, end) of a row, every `step`-th, as host int64."""
        if self._host is not None:
            return self._host[row, start:end:step].astype(np.int64)
        part = self.tensor[row, start:end:step]
        host: Int64Array = part.cpu().numpy().astype(np.int64)
        return host

    def gather(self, rows: IntArray, positions: IntArray) -> Int64Array:
        """Entries at (rows[i], positions[i]), as host int64."""
        if self._host is not None:
            return self._host[rows, positions].astype(np.int64)
        where = upload(np.stack([rows, positions]), self.tensor.device)
        host: Int64Array = self.tensor[where[0], where[1]].cpu().numpy().astype(np.int64)
        return host

    def gather_later(self, rows: IntArray, positions: IntArray) -> LateRead:
        """As `gather`, but the host goes on; ordered after what the current stream holds now."""
        where = upload(np.stack([rows, positions]), self.tensor.device)
        found = self.tensor[where[0], where[1]]
        if not self.tensor.is_cuda:
            return LateRead(found, None)
        host = torch.empty_like(found, device="cpu", pin_memory=True)
        host.copy_(found, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return LateRead(host, event)

    def zero(self, row: Row, positions: Int64Array) -> None:
        """Mark entries of one row dead."""
        if self._host is not None:
            self._host[row, positions] = 0
        else:
            self.tensor[row].index_fill_(0, upload(positions, self.tensor.device), 0)

    def write(self, rows: Int64Array, positions: Int64Array, slots: Int64Array) -> None:
        """Set the entries at (rows[i], positions[i]) to slots[i], in one launch."""
        if self._host is not None:
            self._host[rows, positions] = slots
            return
        packed = upload(np.stack([rows, positions, slots]), self.tensor.device)
        apply_moves(self.tensor, packed[0], packed[1], packed[2])
