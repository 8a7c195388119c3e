"""Live lengths of a forward, from what the host counts as evicted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from vtoken_sglang.engine.attention.live_lengths import measure
from vtoken_sglang.errors import InvariantError

ROWS = [3, 9, 4]


def batches(
    spans: list[int], prefix: list[int] | None, *, host: bool = True
) -> tuple[SimpleNamespace, SimpleNamespace]:
    """(ScheduleBatch, ForwardBatch) of rows `ROWS`."""
    requests = [SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row)) for row in ROWS]
    lens = torch.tensor(spans)
    forward = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if prefix is None else ForwardMode.EXTEND,
        seq_lens=lens,
        seq_lens_cpu=lens.clone() if host else None,
    )
    return SimpleNamespace(reqs=requests, prefix_lens=prefix), forward


def test_decode() -> None:
    live = measure(*batches([10, 20, 30], None), {3: 4, 9: 0, 4: 29}.__getitem__)
    assert live is not None
    assert live.lens.tolist() == live.lens_cpu.tolist() == [6, 20, 1]
    assert live.lens.dtype == torch.int64
    assert live.prefix_lens is None
    assert live.prefix_lens_cpu is None


def test_extend() -> None:
    live = measure(*batches([10, 20, 30], [7, 0, 29]), {3: 4, 9: 0, 4: 29}.__getitem__)
    assert live is not None
    assert live.lens.tolist() == live.lens_cpu.tolist() == [6, 20, 1]
    assert live.prefix_lens.tolist() == live.prefix_lens_cpu.tolist() == [3, 0, 0]


def test_without_host_lengths() -> None:
    live = measure(*batches([10, 20, 30], None, host=False), {3: 4, 9: 0, 4: 2}.__getitem__)
    assert live is not None
    assert live.lens.tolist() == [6, 20, 28]
    assert live.lens_cpu is None


def test_nothing_is_measured_where_nothing_was_evicted() -> None:
    assert measure(*batches([10, 20, 30], None), lambda row: 0) is None


@pytest.mark.parametrize(
    ("prefix", "evicted"), [(None, {3: 10, 9: 0, 4: 0}), ([7, 0, 29], {3: 0, 9: 1, 4: 0})]
)
def test_more_evicted_than_there_can_be(prefix: list[int] | None, evicted: dict[int, int]) -> None:
    """The last token of a decode and the own tokens of an extend are alive."""
    with pytest.raises(InvariantError, match="evicted tokens"):
        measure(*batches([10, 20, 30], prefix), evicted.__getitem__)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(InvariantError, match="row 3: -1 evicted"):
        measure(*batches([10, 20, 30], None), {3: -1, 9: 0, 4: 0}.__getitem__)
