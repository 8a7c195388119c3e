"""Whether a finished copy may be committed, and the commit itself.

Row entries, counts and ledger change together, for one request, between two forwards. A plan that
no longer fits its row is refused with StalePlanError and changes nothing: the caller gives it up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch

from vtoken_sglang.core.copy_engine import Fence
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Generation, Int64Array, RepackPlan, Row
from vtoken_sglang.errors import StalePlanError, VTokenError

Identity: TypeAlias = Callable[[Row], tuple[Generation, object]]
"""What the engine says now about a row: (generation, record)."""

_WEIGHT_SEED: Final = 0x5EED
_MIX: Final = 0x100000001B3
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class CorruptCopyError(VTokenError, RuntimeError):
    """The destinations of a finished copy do not hold the bytes of its sources."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingCopy:
    """A plan whose copy was submitted.

    Fields:
        plan: what moves.
        fence: end of the copy; shared by the plans of one submit.
        due: number of the step that waits for the copy and commits it.
        hashes: int64 [n], byte hash of every source row at submit, on the buffers' device, in
            check mode only.
    """

    plan: RepackPlan
    fence: Fence
    due: int
    hashes: torch.Tensor | None


def check_identity(plan: RepackPlan, table: TokenTable, identity: Identity | None) -> None:
    """Raise StalePlanError unless the plan's request still owns the row.

    `identity`: None trusts the table, which the engine opened and has not closed.
    """
    claims = [("table", table.generation, table.record)]
    if identity is not None:
        claims.append(("engine", *identity(plan.row)))
    for who, generation, record in claims:
        if generation != plan.generation:
            wrong = f"generation {plan.generation} is stale, the {who} has {generation}"
            raise StalePlanError(f"row {plan.row}: {wrong}")
        if record is not plan.record:
            raise StalePlanError(f"row {plan.row}: the {who} holds another request's record")


def check_bytes(
    pending: PendingCopy,
    table: TokenTable,
    rows: RequestRows,
    buffers: Sequence[torch.Tensor],
) -> None:
    """Check mode: the row still names the sources, and the destinations hold their bytes.

    Raises StalePlanError if a live entry of the device row is not the plan's source or an evicted
    one is not zero, CorruptCopyError if a live token's bytes differ from those hashed at submit.
    """
    plan = pending.plan
    positions = plan.positions.astype(np.int64)
    alive = table.alive(positions)
    entries = rows.gather(np.full(len(positions), plan.row), positions)
    if (entries != np.where(alive, plan.src_slots, 0)).any():
        raise StalePlanError(f"row {plan.row}: its entries are not the plan's sources")
    if pending.hashes is None:
        return
    copied = row_hashes(buffers, plan.dst_slots)
    wrong = (copied != pending.hashes).cpu().numpy() & alive
    if wrong.any():
        raise CorruptCopyError(
            f"row {plan.row}: {int(wrong.sum())} of {len(positions)} copied tokens differ from "
            f"their source, first at position {int(positions[wrong][0])}"
        )


@dataclass(slots=True)
class RowWrites:
    """Row entries to write at the end of the safe point, collected over all rows.

    Fields:
        row_ids, positions, slots: int64 [n] each, one triple of arrays per commit.
    """

    row_ids: list[Int64Array]
    positions: list[Int64Array]
    slots: list[Int64Array]

    def flush(self, rows: RequestRows) -> int:
        """Write them in one launch; returns how many."""
        if not self.row_ids:
            return 0
        positions = np.concatenate(self.positions)
        rows.write(np.concatenate(self.row_ids), positions, np.concatenate(self.slots))
        return len(positions)


def commit(plan: RepackPlan, table: TokenTable, writes: RowWrites) -> None:
    """Commit one row: host state now, its row entries into `writes`. The plan's source pages are
    free afterwards.

    Raises StalePlanError, having changed nothing, if a live token is not at its source.
    """
    positions, slots = table.apply_moves(plan)
    writes.row_ids.append(np.full(len(positions), plan.row, np.int64))
    writes.positions.append(positions)
    writes.slots.append(slots)


def row_hashes(buffers: Sequence[torch.Tensor], slots: Int64Array) -> torch.Tensor:
    """Hash of the bytes at each slot over all buffers: int64 [n], on the buffers' device.

    Sums of words times random odd weights, modulo 2**64: any single changed word changes the hash,
    and so does a swap of rows between buffers. Equal bytes give equal hashes, NaN included.
    """
    index = torch.from_numpy(slots).to(buffers[0].device)
    total = torch.zeros(len(slots), dtype=torch.int64, device=index.device)
    for buffer in buffers:
        values = buffer.index_select(0, index).flatten(1)
        row_bytes = values.shape[1] * values.element_size()
        word = next(dtype for size, dtype in _WORDS if row_bytes % size == 0)
        words = values.contiguous().view(word).to(torch.int64)
        total = total * _MIX + (words * _weights(words.shape[1], index.device)).sum(1)
    return total


def _weights(count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_WEIGHT_SEED)
    limit = 2**62
    weights = torch.randint(-limit, limit, (count,), dtype=torch.int64, generator=generator)
    return (weights | 1).to(device)
