import sys
from array import array

import numpy as np
import pytest

from vtoken_sglang.core.ledger import PageLedger
from vtoken_sglang.core.token_table import TokenTable
from vtoken_sglang.core.types import Generation, PositionError, RepackPlan, Row
from vtoken_sglang.errors import StalePlanError

BYTES_PER_TOKEN = 16


def table_of(length: int, page_size: int = 4, protected: int = 0) -> TokenTable:
    count = -(-(length - protected) // page_size)
    return TokenTable(
        row=Row(1),
        generation=Generation(1),
        record=None,
        page_size=page_size,
        protected_len=protected,
        logical_len=length,
        pages=np.arange(100, 100 + count),
    )


def plan_for(table: TokenTable, codes: list[int], pages: list[int]) -> RepackPlan:
    sources = np.array(codes, np.int64)
    positions, slots = table.live_tokens_of(sources)
    table.ledger.reserve(sources)
    return RepackPlan(
        row=table.row,
        generation=table.generation,
        record=table.record,
        page_size=table.page_size,
        positions=positions,
        src_slots=slots.astype(np.int32),
        source_codes=sources.astype(np.int32),
        source_pages=table.ledger.page[sources].astype(np.int64),
        dst_pages=np.array(pages, np.int64),
        limited=False,
    )


@pytest.mark.parametrize("count", [3, 30])
def test_evict_returns_only_what_was_alive(count: int) -> None:
    table = table_of(200)
    evicted = np.arange(5, 5 + count)
    assert table.evict_tokens(evicted).tolist() == evicted.tolist()
    assert table.evict_tokens(evicted).tolist() == []
    more = table.evict_tokens(np.concatenate([evicted, [190, 190, 3]]))
    assert sorted(more.tolist()) == [3, 190]
    assert (table.evicted, table.live_len) == (count + 2, 198 - count)
    assert table.ledger.live_tokens == 198 - count
    assert table.evict_tokens([3, 4]).tolist() == [4]
    assert table.evict_tokens([]).tolist() == []


@pytest.mark.parametrize("filler", [0, 40])
@pytest.mark.parametrize("bad", [-1, 96, 97, 200])
def test_the_open_tail_and_unknown_positions_are_refused(bad: int, filler: int) -> None:
    table = table_of(98)
    with pytest.raises(PositionError, match="96"):
        table.evict_tokens(np.append(np.arange(filler), bad))
    assert table.evicted == 0
    assert table.ledger.live_tokens == 98


def test_a_full_last_page_still_counts_as_open() -> None:
    table = table_of(96)
    assert table.open_start == 92
    with pytest.raises(PositionError):
        table.evict_tokens([92])


@pytest.mark.parametrize("count", [4, 30])
def test_tree_owned_evictions_are_masks(count: int) -> None:
    table = table_of(100, protected=40)
    table.evict_tokens(np.arange(38 - count, 42))
    assert table.evicted == count + 4
    assert table.ledger.live_tokens == 60 - 2
    assert table.tree_owned_live() == 40 - count - 2


def test_new_tokens_fill_the_tail_page_first() -> None:
    table = table_of(6)
    table.sync_new_tokens(7)
    assert not table.ledger.has_unread
    table.sync_new_tokens(14)
    assert table.ledger.pages_held == 4
    assert table.ledger.live[:4].tolist() == [4, 4, 4, 2]
    assert table.unread_start() == 8
    table.set_unread(np.array([80, 84]))
    assert table.slots_of(np.array([5, 8, 13])).tolist() == [405, 80, 85]
    with pytest.raises(PositionError):
        table.sync_new_tokens(13)


def test_live_tokens_come_in_logical_order_from_any_mix_of_pages() -> None:
    table = table_of(40)
    table.seal(36)
    table.evict_tokens(np.array([p for p in range(16) if p % 2]))
    table.apply_moves(plan_for(table, [3, 1], [60]))
    table.evict_tokens(np.array([6, 9]))
    positions, slots = table.live_tokens_of(np.array([2, -1, 0]))
    assert positions.tolist() == [0, 2, 4, 8, 10, 12, 14]
    assert slots.tolist() == table.slots_of(positions).tolist()
    assert slots.tolist() == [400, 402, 240, 408, 410, 242, 243]


def test_apply_moves_commits_counts_ledger_and_places() -> None:
    table = table_of(40)
    table.seal(36)
    table.evict_tokens(np.array([p for p in range(8) if p % 4]))
    plan = plan_for(table, [0, 1], [60])
    moved, slots = table.apply_moves(plan)
    assert (moved.tolist(), slots.tolist()) == ([0, 4], [240, 241])
    assert plan.gain == 1
    assert (table.ledger.pages_held, table.ledger.live_tokens) == (9, 34)
    assert table.slots_of(np.array([0, 1, 4])).tolist() == [240, 0, 241]
    assert table.repacked_waste == pytest.approx(table.sealed_waste()) == pytest.approx(1 - 30 / 32)


def test_a_token_evicted_during_the_copy_stays_evicted() -> None:
    table = table_of(40)
    table.seal(36)
    table.evict_tokens(np.array([1, 2, 3, 5, 6, 7]))
    plan = plan_for(table, [0, 1], [60])
    table.evict_tokens(np.array([0]))
    moved, slots = table.apply_moves(plan)
    assert (moved.tolist(), slots.tolist()) == ([4], [241])
    assert table.slots_of(np.array([0, 4])).tolist() == [0, 241]
    assert table.ledger.live[-1] == 1
    assert table.evict_tokens(np.array([0])).tolist() == []


def test_a_plan_is_refused_when_a_live_token_moved_meanwhile() -> None:
    table = table_of(40)
    table.seal(36)
    table.evict_tokens(np.array([1, 2, 3, 5, 6, 7, 9, 10, 11]))
    stale = plan_for(table, [0, 1], [60])
    table.apply_moves(plan_for(table, [1, 2], [61]))
    before = (table.ledger.pages_held, table.ledger.live_tokens)
    with pytest.raises(StalePlanError, match="row 1"):
        table.apply_moves(stale)
    assert (table.ledger.pages_held, table.ledger.live_tokens) == before


def test_slots_of_tree_owned_tokens_are_not_known() -> None:
    table = table_of(40, protected=8)
    with pytest.raises(PositionError):
        table.slots_of(np.array([3]))


def test_sealed_waste_leaves_the_tail_out() -> None:
    table = table_of(9)
    assert table.sealed_waste() == 0.0
    table.seal(8)
    table.evict_tokens(np.array([0, 1, 2]))
    assert table.sealed_waste() == pytest.approx(3 / 8)
    with pytest.raises(PositionError):
        table.seal(10)


def test_wrong_geometry_is_refused() -> None:
    with pytest.raises(PositionError):
        table_of(40, protected=6)
    with pytest.raises(PositionError):
        TokenTable(
            row=Row(1),
            generation=Generation(1),
            record=None,
            page_size=4,
            protected_len=0,
            logical_len=9,
            pages=np.arange(1, 3),
        )


def test_a_tail_page_that_ends_beyond_the_known_length_holds_only_known_tokens() -> None:
    table = table_of(100, page_size=64)
    table.sync_new_tokens(116)  # exactly the capacity of the place array
    positions, _ = table.live_tokens_of(np.array([1]))
    assert positions.tolist() == list(range(64, 116))


def bytes_of(part: object) -> int:
    """Host bytes of an object and of what its slots hold, unused capacity included."""
    values = [getattr(part, name) for name in type(part).__slots__]  # type: ignore[attr-defined]
    arrays = sum(value.nbytes for value in values if isinstance(value, np.ndarray))
    lists = sum(len(value) * value.itemsize for value in values if isinstance(value, array))
    inner = sum(bytes_of(value) for value in values if isinstance(value, PageLedger))
    return sys.getsizeof(part) + arrays + lists + inner


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_metadata_per_token(page_size: int) -> None:
    """Worst state over a request's life, per known token: grown by single tokens, then one token
    of every page is evicted and all the others are compacted, the plan still in flight."""
    table = table_of(1024, page_size)
    worst = 0.0
    for length in range(1025, 4097):
        table.sync_new_tokens(length)
        if table.ledger.has_unread:
            table.set_unread(np.array([length * page_size]))
        worst = max(worst, bytes_of(table) / length)
    table.seal(table.open_start)
    table.evict_tokens(np.arange(0, table.open_start, page_size))
    worst = max(worst, bytes_of(table) / 4096)
    if page_size > 1:
        codes = table.ledger.candidates(99999)[0].tolist()
        pages = -(-table.ledger.sealed_live // page_size)
        plan = plan_for(table, codes, list(range(9000, 9000 + pages)))
        worst = max(worst, (bytes_of(table) + bytes_of(plan)) / 4096)
        table.apply_moves(plan)
        assert len(plan.positions) == (page_size - 1) * len(codes) > 3500 * (1 - 8 / page_size)
        worst = max(worst, bytes_of(table) / 4096)
    print(f"page size {page_size}: {worst:.2f} bytes of metadata per token")
    assert worst <= BYTES_PER_TOKEN
