"""SGLang's own index kernel, for the benchmark that compares ours with it."""

from __future__ import annotations

import torch
from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton


def gather_rows(
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    lens: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Gather the first `lens[b]` entries of each lane's row, as SGLang does before FlashInfer.

    Args:
        rows: in, int32 [num_rows, width], CUDA.
        row_ids, lens: in, int64 [bs].
        indptr: in, int32 [bs + 1], cumulative `lens`.
        out: out, int32 [indptr[-1]].
    """
    create_flashinfer_kv_indices_triton[(len(lens), 1)](
        rows, row_ids, lens, indptr, None, out, rows.stride(0), ENTRY_PAGE_SIZE=1
    )
