import numpy as np
import pytest

from vtoken_sglang.core.ledger import UNREAD, PageLedger
from vtoken_sglang.errors import InvariantError


def ledger_of(pages: int, page_size: int = 4, tokens: int | None = None) -> PageLedger:
    ledger = PageLedger(page_size)
    ledger.add_original(pages, tokens if tokens is not None else pages * page_size)
    ledger.set_unread(np.arange(10, 10 + pages))
    return ledger


def codes(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_appended_pages_are_full_but_the_last() -> None:
    ledger = ledger_of(3, tokens=9)
    assert ledger.live[:3].tolist() == [4, 4, 1]
    ledger.extend_tail(2)
    assert ledger.live[:3].tolist() == [4, 4, 3]
    assert (ledger.pages_held, ledger.live_tokens) == (3, 11)


def test_new_pages_are_unread_until_told() -> None:
    ledger = ledger_of(2)
    assert not ledger.has_unread
    ledger.add_original(2, 5)
    assert ledger.has_unread
    assert ledger.page[2:4].tolist() == [UNREAD, UNREAD]
    with pytest.raises(InvariantError, match="bad ids"):
        ledger.set_unread(np.array([7, 8, 9]))
    with pytest.raises(InvariantError, match="bad ids"):
        ledger.set_unread(np.array([7, 0]))
    ledger.set_unread(np.array([7]))
    assert ledger.page[2:4].tolist() == [7, UNREAD]
    ledger.set_unread(np.array([8]))
    assert not ledger.has_unread


@pytest.mark.parametrize("count", [1, 20])
def test_only_sealed_empty_pages_are_taken(count: int) -> None:
    ledger = ledger_of(2 * count, page_size=1)
    ledger.evict(np.arange(2 * count))
    assert len(ledger.take_empty()) == 0
    assert ledger.has_empty
    ledger.seal(count)
    assert ledger.take_empty().tolist() == list(range(10, 10 + count))
    ledger.seal(2 * count)
    assert ledger.take_empty().tolist() == list(range(10 + count, 10 + 2 * count))
    assert not ledger.has_empty
    assert (ledger.pages_held, ledger.live_tokens, ledger.sealed_pages) == (0, 0, 0)


def test_eviction_counts_per_page_and_below_the_seal() -> None:
    ledger = ledger_of(4)
    ledger.seal(2)
    ledger.evict(codes(0, 1, 1, 2, 2, 2, 3))
    assert ledger.live[:4].tolist() == [3, 2, 1, 3]
    assert (ledger.sealed_pages, ledger.sealed_live, ledger.live_tokens) == (2, 5, 9)
    ledger.seal(3)
    assert (ledger.sealed_pages, ledger.sealed_live) == (3, 6)
    assert ledger.candidates(99999)[0].tolist() == [0, 1, 2]


def test_candidates_are_partly_filled_sealed_and_free_of_plans() -> None:
    ledger = ledger_of(5)
    ledger.seal(4)
    ledger.evict(codes(0, 1, 2, 2, 2, 2, 4))
    assert ledger.candidates(99999)[0].tolist() == [0, 1]
    ledger.reserve(codes(1))
    assert ledger.candidates(99999)[0].tolist() == [0]
    ledger.evict(codes(1))
    assert ledger.candidates(99999)[0].tolist() == [0]
    ledger.unreserve(codes(1))
    assert ledger.candidates(99999)[0].tolist() == [0, 1]


@pytest.mark.parametrize("extra", [0, 20])
def test_a_reserved_page_that_empties_is_not_freed_before_its_plan_is_decided(extra: int) -> None:
    ledger = ledger_of(2 + extra)
    ledger.seal(2 + extra)
    ledger.evict(codes(0, 0, 0))
    ledger.reserve(codes(0))
    ledger.evict(codes(0, *np.repeat(np.arange(2, 2 + extra), 4)))
    assert 10 not in ledger.take_empty().tolist()
    ledger.unreserve(codes(0))
    assert ledger.take_empty().tolist() == [10]


def test_a_page_cannot_be_removed_twice() -> None:
    ledger = ledger_of(2)
    ledger.seal(2)
    assert ledger.remove(codes(1)).tolist() == [11]
    with pytest.raises(InvariantError, match="twice"):
        ledger.remove(codes(1))


def test_compacted_codes_survive_growth_and_are_reused() -> None:
    ledger = ledger_of(1)
    positions = np.arange(8, dtype=np.int32).reshape(2, 4)
    first = ledger.add_compacted(codes(50, 51), np.array([4, 3]), positions)
    assert first.tolist() == [-1, -2]
    ledger.add_original(400, 1600)
    more = np.arange(1200, dtype=np.int32).reshape(300, 4)
    ledger.add_compacted(np.arange(500, 800), np.full(300, 4), more)
    assert ledger.page[first].tolist() == [50, 51]
    assert ledger.compacted_positions(first).tolist() == positions.tolist()
    assert ledger.remove(codes(-2)).tolist() == [51]
    assert ledger.add_compacted(codes(90), np.array([2]), positions[:1]).tolist() == [-2]
    assert ledger.compacted_positions(codes(-2)).tolist() == positions[:1].tolist()


def test_a_partly_filled_compacted_page_is_a_candidate_and_an_empty_one_is_freed() -> None:
    ledger = ledger_of(1)
    zeros = np.zeros((3, 4), np.int32)
    ledger.add_compacted(codes(20, 21, 22), np.array([4, 2, 0]), zeros)
    assert ledger.candidates(99999)[0].tolist() == [-2]
    assert ledger.take_empty().tolist() == [22]


def test_a_limited_search_takes_turns() -> None:
    ledger = ledger_of(10)
    ledger.seal(10)
    ledger.evict(np.arange(10))
    seen = [ledger.candidates(4) for _ in range(3)]
    assert [codes.tolist() for codes, _ in seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 8, 9]]
    assert not any(complete for _, complete in seen)
    assert ledger.candidates(10)[1]


def test_the_list_of_partly_filled_pages_stays_bounded() -> None:
    ledger = ledger_of(4)
    ledger.seal(4)
    for _ in range(200):
        ledger.evict(codes(0))
        ledger.remove(codes(0))
        ledger.page[0], ledger.live[0] = 10, 4
        ledger.pages_held += 1
        ledger.sealed_pages += 1
        ledger.sealed_live += 4
        ledger.live_tokens += 4
    assert len(ledger._partial) < 64


def test_page_size_limits() -> None:
    with pytest.raises(InvariantError):
        PageLedger(0)
    with pytest.raises(InvariantError):
        PageLedger(1 << 16)
