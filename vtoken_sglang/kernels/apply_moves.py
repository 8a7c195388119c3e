"""`apply_moves`: commit row entries to the slots their tokens were copied to.

Paper: `apply_moves` (arXiv 2608.13263, section 4). One launch for all rows of a safe point, on the
caller's stream, which orders it after the forward that read the old slots and before the next.
"""

from __future__ import annotations

import torch

from vtoken_sglang.kernels.apply_moves_ref import apply_moves_ref


def apply_moves(
    rows: torch.Tensor, row_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """For every i with `row_ids[i] > 0`: `rows[row_ids[i], positions[i]] = slots[i]`.

    All tensors are on one device. Entries for row 0, the padding row, are skipped, so a list may
    be padded to a fixed length.

    Args:
        rows: in/out, the engine's row table, int32 [num_rows, width], unit stride in a row.
        row_ids, positions, slots: in, int64 [n]; no (row, position) twice; slot 0 marks dead.
    """
    if rows.is_cuda:
        from vtoken_sglang.kernels.triton_apply_moves import apply_moves_triton

        apply_moves_triton(rows, row_ids, positions, slots)
    else:
        apply_moves_ref(rows, row_ids, positions, slots)
