"""Whether a finished copy may be committed in, and the commit itself.

Row entries, counts and ledger change together, for one request, between two forwards. A plan that
no longer fits its row is refused with StalePlanError and changes nothing: the caller gives it up
and keeps the destinations until the fence has passed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from vtoken_sglang.core.fence import Fence
from vtoken_sglang.core.plan import RepackPlan
from vtoken_sglang.core.row_hash import row_hashes
from vtoken_sglang.core.rows import RequestRows
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Generation, Int64Array, Row
from vtoken_sglang.errors import StalePlanError, VTokenError

Identity: TypeAlias = Callable[[Row], tuple[Generation, object]]


class CorruptCopyError(VTokenError, RuntimeError):
    """The destinations of a finished copy do not hold the bytes of its sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCopy:
    """A repack whose copy was submitted.

    Fields:
        plan: what moves.
        fence: passes when the copy can write no more; shared by the plans of one submit.
        hashes: int64 [n], byte hash of every source row at submit, in check mode only.
    """

    plan: RepackPlan
    fence: Fence
    hashes: torch.Tensor | None


def check_identity(
    plan: RepackPlan, table: TokenTable | None, identity: Identity | None
) -> TokenTable:
    """The table, if the plan's request still owns the row; else raises StalePlanError.

    `identity`: what the engine says now about the row, (generation, record); None trusts the
    table, which the engine opened and has not closed.
    """
    if table is None:
        raise StalePlanError(f"row {plan.row}: the request has ended")
    claims = [("table", table.generation, table.record)]
    if identity is not None:
        claims.append(("engine", *identity(plan.row)))
    for who, generation, record in claims:
        if generation != plan.generation:
            wrong = f"generation {plan.generation} is stale, the {who} has {generation}"
            raise StalePlanError(f"row {plan.row}: {wrong}")
        if record is not plan.record:
            raise StalePlanError(f"row {plan.row}: the {who} holds another request's record")
    return table


def check_bytes(
    pending: PendingCopy,
    table: TokenTable,
    rows: RequestRows,
    buffers: Sequence[torch.Tensor],
) -> None:
    """Check mode: the row still names the sources, and the destinations hold their bytes.

    Raises StalePlanError if a live entry of the device row is not the plan's source or a dead one
    is not zero, CorruptCopyError if a live token's bytes differ from those hashed at submit.
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
    """Row entries to write at the end of the safe point, collected over all rows."""

    rows: list[Int64Array]
    positions: list[Int64Array]
    slots: list[Int64Array]

    def flush(self, rows: RequestRows) -> int:
        """Write them in one launch; returns how many."""
        if not self.rows:
            return 0
        positions = np.concatenate(self.positions)
        rows.write(np.concatenate(self.rows), positions, np.concatenate(self.slots))
        return len(positions)


def commit(plan: RepackPlan, table: TokenTable, writes: RowWrites) -> Int64Array:
    """Commit one row: host state now, its row entries into `writes`. Returns the pages set free.

    Raises StalePlanError, having changed nothing, if a live token is not at its source.
    """
    positions, slots = table.apply_moves(plan)
    writes.rows.append(np.full(len(positions), plan.row, np.int64))
    writes.positions.append(positions)
    writes.slots.append(slots)
    return plan.source_pages
