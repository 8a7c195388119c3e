"""Page-mode plans: chosen only for dense batches, same result as slot plans."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.helpers.attention_batches import (
    Geometry,
    Lanes,
    cuda_replaced,
    make_batch,
    make_layer,
    make_runner,
    place,
    random_qkv,
)
from vtoken_sglang.engine.attention import live_lengths as kv_lens
from vtoken_sglang.engine.attention.flashinfer import VTokenFlashInferAttnBackend
from vtoken_sglang.engine.attention.page_mode import to_pages

PAGE = 16
GEOMETRY = Geometry(page_size=PAGE)
CASES = [
    (ForwardMode.DECODE, [0, 15, 16, 31, 200], [1] * 5),
    (ForwardMode.EXTEND, [0, 32, 64], [40, 1, 17]),
    (ForwardMode.MIXED, [64, 0, 99], [30, 5, 1]),
]


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with cuda_replaced():
        yield


def drop_pages(runner: SimpleNamespace, lanes: Lanes) -> None:
    """Eviction every second whole page before the tail page: the live lists stay dense."""
    table = runner.req_to_token_pool.req_to_token
    for row, prefix in zip(lanes.rows, lanes.prefix, strict=True):
        for start in range(0, max(prefix - PAGE, 0) // PAGE * PAGE, 2 * PAGE):
            table[row, start : start + PAGE] = 0
            lanes.dead[row] += PAGE


def run(
    runner: SimpleNamespace,
    lanes: Lanes,
    mode: ForwardMode,
    *,
    page_mode: bool,
    dense: bool,
    paged_only: bool = False,
) -> tuple[torch.Tensor, VTokenFlashInferAttnBackend]:
    backend = VTokenFlashInferAttnBackend(runner, page_mode=page_mode)
    backend.use_paged = paged_only
    batch = make_batch(runner, lanes, mode)
    if dense:
        kv_lens._dense_plans.add(batch.kv_loc_plan)
    q, k, v = random_qkv(GEOMETRY, len(batch.out_cache_loc))
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if mode == ForwardMode.DECODE else backend.forward_extend
    return forward(q, k, v, make_layer(GEOMETRY), batch), backend


def planned_sizes(backend: VTokenFlashInferAttnBackend, mode: ForwardMode) -> set[int]:
    decode = mode == ForwardMode.DECODE
    wrappers = backend.decode_wrappers if decode else backend.prefill_wrappers_paged
    return {plan["page_size"] for wrapper in wrappers for plan in wrapper._wrapper.plans}


@pytest.mark.parametrize(("mode", "prefix", "own"), CASES)
@pytest.mark.parametrize("paged_only", [False, True])
@pytest.mark.parametrize("pruned", [False, True])
def test_equals_the_slot_plan(
    mode: ForwardMode, prefix: list[int], own: list[int], paged_only: bool, pruned: bool
) -> None:
    runner = make_runner(GEOMETRY)
    lanes = place(runner, Lanes(prefix=prefix, own=own), evicted_share=0.0)
    if pruned:
        drop_pages(runner, lanes)
    options = {"dense": pruned, "paged_only": paged_only}
    slots, _ = run(runner, lanes, mode, page_mode=False, **options)
    pages, backend = run(runner, lanes, mode, page_mode=True, **options)
    assert planned_sizes(backend, mode) == {PAGE}
    torch.testing.assert_close(pages, slots, atol=1e-6, rtol=1e-6)


def test_holes_inside_pages_fall_back_to_slots() -> None:
    runner = make_runner(GEOMETRY)
    lanes = place(runner, Lanes(prefix=[100], own=[1]), evicted_share=0.5)
    _, backend = run(runner, lanes, ForwardMode.DECODE, page_mode=True, dense=False)
    assert planned_sizes(backend, ForwardMode.DECODE) == {1}


def test_off_for_page_size_one_and_in_deterministic_mode() -> None:
    assert VTokenFlashInferAttnBackend(make_runner(Geometry()), page_mode=True).page_wrappers == []
    with cuda_replaced(enable_deterministic_inference=True):
        backend = VTokenFlashInferAttnBackend(make_runner(GEOMETRY), page_mode=True)
        assert backend.page_wrappers == []


def test_captured_decode_plans_slots() -> None:
    """A captured graph has its page size fixed, so its wrappers are stock."""
    backend = VTokenFlashInferAttnBackend(make_runner(GEOMETRY), page_mode=True)
    backend.init_cuda_graph_state(4, 4)
    wrappers = backend.get_cuda_graph_decode_wrappers(bs=4, num_tokens=4)
    assert not any(wrapper in backend.page_wrappers for wrapper in wrappers)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.sampled_from([1, 4, 16]))
def test_to_pages(lens: list[int], page_size: int) -> None:
    """Against a loop; the lists of all lanes lie one after the other."""
    slots, wanted, ends, last = [], [], [0], []
    page = 7
    for length in lens:
        pages = -(-length // page_size)
        ids = list(range(page, page + 2 * pages, 2))
        page += 2 * pages + 1
        wanted += ids
        ends.append(len(wanted))
        last.append(length - max(pages - 1, 0) * page_size)
        slots += [p * page_size + offset for p in ids for offset in range(page_size)][:length]
    indptr = torch.tensor([0, *lens]).cumsum(0).to(torch.int32)
    got = to_pages(indptr, torch.tensor(slots + [5], dtype=torch.int32), page_size)
    assert [tensor.tolist() for tensor in got] == [ends, wanted, last]
    assert {tensor.dtype for tensor in got} == {torch.int32}
