"""The listener that tells each forward's plan the live lengths."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from vtoken_sglang.engine.attention import live_lengths as kv_lens
from vtoken_sglang.errors import HookError, InvariantError

ROWS = [3, 9, 4]


@pytest.fixture(autouse=True)
def _no_listener_left() -> Iterator[None]:
    yield
    kv_lens.uninstall()


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


def empty_plan() -> KVLocPlan:
    plan = KVLocPlan.__new__(KVLocPlan)
    plan.kv_lens = plan.kv_lens_cpu = plan.kv_prefix_lens = plan.kv_prefix_lens_cpu = None
    return plan


def test_decode() -> None:
    plan = empty_plan()
    kv_lens.fill(plan, *batches([10, 20, 30], None), {3: 4, 9: 0, 4: 29}.__getitem__)
    assert plan.kv_lens.tolist() == plan.kv_lens_cpu.tolist() == [6, 20, 1]
    assert plan.kv_lens.dtype == torch.int64
    assert plan.kv_prefix_lens is None
    assert plan.kv_prefix_lens_cpu is None


def test_extend() -> None:
    plan = empty_plan()
    kv_lens.fill(plan, *batches([10, 20, 30], [7, 0, 29]), {3: 4, 9: 0, 4: 29}.__getitem__)
    assert plan.kv_lens.tolist() == plan.kv_lens_cpu.tolist() == [6, 20, 1]
    assert plan.kv_prefix_lens.tolist() == plan.kv_prefix_lens_cpu.tolist() == [3, 0, 0]


def test_without_host_lengths() -> None:
    plan = empty_plan()
    kv_lens.fill(plan, *batches([10, 20, 30], None, host=False), {3: 4, 9: 0, 4: 2}.__getitem__)
    assert plan.kv_lens.tolist() == [6, 20, 28]
    assert plan.kv_lens_cpu is None


def test_no_dead_tokens_leave_the_plan_alone() -> None:
    plan = empty_plan()
    kv_lens.fill(plan, *batches([10, 20, 30], None), lambda row: 0)
    assert plan.kv_lens is None
    assert kv_lens.is_dense_plan(plan)


@pytest.mark.parametrize(
    ("prefix", "dead"), [(None, {3: 10, 9: 0, 4: 0}), ([7, 0, 29], {3: 0, 9: 1, 4: 0})]
)
def test_more_dead_than_there_can_be(prefix: list[int] | None, dead: dict[int, int]) -> None:
    """The last token of a decode and the own tokens of an extend are alive."""
    with pytest.raises(InvariantError, match="evicted tokens"):
        kv_lens.fill(empty_plan(), *batches([10, 20, 30], prefix), dead.__getitem__)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(InvariantError, match="row 3: -1 evicted"):
        kv_lens.fill(empty_plan(), *batches([10, 20, 30], None), {3: -1, 9: 0, 4: 0}.__getitem__)


def test_density_is_asked_of_pruned_rows_only() -> None:
    dead = {3: 4, 9: 0, 4: 16}.__getitem__
    for dense_rows, answer in (({3, 4}, True), ({3}, False)):
        plan, asked = empty_plan(), []

        def is_dense(row: int, dense_rows: set[int] = dense_rows, asked: list[int] = asked) -> bool:
            asked.append(row)
            return row in dense_rows

        kv_lens.fill(plan, *batches([10, 20, 30], None), dead, is_dense)
        assert kv_lens.is_dense_plan(plan) is answer
        assert set(asked) <= {3, 4}
    plan = empty_plan()
    kv_lens.fill(plan, *batches([10, 20, 30], None), dead)
    assert not kv_lens.is_dense_plan(plan)


def test_the_patched_plan_calls_the_listener() -> None:
    plan = empty_plan()
    schedule, forward = batches([10, 20, 30], None)
    kv_lens.install({3: 4, 9: 0, 4: 2}.__getitem__)
    plan.fill_kv_lens(schedule, forward)
    assert plan.kv_lens.tolist() == [6, 20, 28]


def test_one_listener_at_a_time() -> None:
    kv_lens.install(lambda row: 0)
    with pytest.raises(HookError, match="another listener"):
        kv_lens.install(lambda row: 0)
    kv_lens.uninstall()
    kv_lens.install(lambda row: 0)


def test_an_unpatched_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(KVLocPlan, "kv_lens_listener")
    with pytest.raises(HookError, match="not patched"):
        kv_lens.install(lambda row: 0)
    monkeypatch.undo()
