"""Forks of tree-owned prefixes over SGLang's own tree: who may evict what, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tests.helpers.prefix_engine import PrefixEngine, TreeRequest
from vtoken_sglang.core.types import LAG
from vtoken_sglang.options import VTokenConfig

MakeEngine = Callable[..., PrefixEngine]
PREFIX = list(range(1000, 1096))
OTHER = list(range(2000, 2096))


@pytest.fixture(params=["python-16", "rust-16", "python-1", "rust-1"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    core, page_size = request.param.split("-")

    def make(tokens: int = 1600, **settings: Any) -> PrefixEngine:
        thinned = {"policy": "random", "keep": 0.4, "sink": 0, "recent": 8, "interval": 1}
        config = VTokenConfig(**{**thinned, "check": True, **settings})  # type: ignore[arg-type]
        size = int(page_size)
        return PrefixEngine(monkeypatch, config, page_size=size, pages=tokens // size, core=core)

    return make


def admitted(sim: PrefixEngine, rid: str, prompt: list[int], **options: Any) -> TreeRequest:
    request = sim.admit(rid, prompt, **options)
    assert request is not None
    return request


def cached(sim: PrefixEngine, prompt: list[int]) -> int:
    """Tokens of a prompt that the tree would give to a newcomer. Uses them: they become hot."""
    probe = admitted(sim, "probe", [*prompt, 7], policy="none")
    hit = probe.prefix_len
    sim.finish(probe, checkpoint=False)
    return hit


def evict(sim: PrefixEngine, tokens: int) -> None:
    sim.tree.evict(EvictParams(num_tokens=tokens))


@pytest.mark.parametrize("shared", ["cow", "auto"])
def test_the_last_holder_forks_and_its_prefix_is_evictable_at_once(
    engine: MakeEngine, shared: str
) -> None:
    sim = engine()
    request = admitted(sim, "a", PREFIX, shared=shared)
    sim.steps(2)
    assert sim.tree.protected_size() == 96
    sim.until_due()  # the commit and the lock go together
    kept = request.kv.cache_protected_len
    # `auto` leaves a fully live beginning in the tree: copying it would gain nothing.
    assert kept == 0 if shared == "cow" else kept < 32
    assert sim.tree.protected_size() == kept
    assert sim.tree.evictable_size() == 96 - kept
    assert sim.accounted() == sim.total
    live = sim.seen(request)
    assert live[:kept] == list(range(kept))
    evict(sim, 96)  # in the same safe point
    assert sim.tree.evictable_size() == 0
    assert sim.seen(request) == live
    sim.steps(20)
    assert sim.seen(request)
    sim.finish(request)
    assert sim.tree.protected_size() == 0
    assert sim.accounted() == sim.total


def test_a_forked_prefix_goes_before_one_used_since_and_after_one_used_before(
    engine: MakeEngine,
) -> None:
    sim = engine()
    oldest = admitted(sim, "oldest", list(range(3000, 3096)), policy="none")
    sim.steps(1)
    sim.finish(oldest)
    forked = admitted(sim, "forked", PREFIX, shared="cow")
    sim.steps(1)
    hot = admitted(sim, "hot", OTHER, policy="none")
    sim.steps(1)
    sim.finish(hot)
    sim.steps(2)
    assert forked.kv.cache_protected_len == 0
    evict(sim, 96)
    pages = set(sim.tree_pages())
    assert cached(sim, list(range(3000, 3096))) == 0, "used longest ago"
    assert cached(sim, PREFIX) == 96
    assert cached(sim, OTHER) == 96
    again = admitted(sim, "again", [*OTHER, 5], policy="none")
    sim.steps(1)
    sim.finish(again)
    evict(sim, 96 - (len(sim.tree_pages()) - len(pages)))
    sim.steps(1)
    assert cached(sim, OTHER) == 96
    assert cached(sim, PREFIX) == 0, "nobody has used it since"
    assert sim.seen(forked)


def test_two_requests_fork_the_same_prefix_in_the_same_step(engine: MakeEngine) -> None:
    sim = engine()
    first = admitted(sim, "first", [*PREFIX, *range(10, 42)], policy="none")
    sim.steps(1)
    sim.finish(first)
    both = [
        admitted(sim, name, [*PREFIX, *range(50 + seed, 90 + seed)], shared="cow", seed=seed)
        for seed, name in enumerate("ab")
    ]
    sim.step()
    sim.safe_point()
    assert len(sim.copies.waiting) == 2
    assert sim.tree.protected_size() >= 96
    sim.until_due()
    assert [request.kv.cache_protected_len for request in both] == [0, 0]
    assert sim.tree.protected_size() == 0
    assert sim.accounted() == sim.total
    evict(sim, sim.tree.evictable_size())
    assert sim.seen(both[0]) != sim.seen(both[1])
    sim.steps(10)
    for request in both:
        assert sim.seen(request)
        sim.finish(request)
    assert sim.allocator.available_size() == sim.total


def test_auto_forks_only_what_no_one_else_holds(engine: MakeEngine) -> None:
    sim = engine()
    keeper = admitted(sim, "keeper", [*PREFIX, 1], policy="none")
    sim.steps(1)
    request = admitted(sim, "a", [*PREFIX, *range(10, 90)], shared="auto")
    sim.steps(4)
    kept = request.kv.cache_protected_len
    assert 96 <= kept < 128, "the part shared with the other is only masked"
    assert sim.tree.protected_size() == max(kept, keeper.kv.cache_protected_len)
    assert sim.accounted() == sim.total
    assert len(sim.seen(keeper)) == len(keeper.tokens)
    if sim.core == "python":
        counts = sim.lock_counts()
        assert max(counts.values()) == 2
        assert all(sim.holder_counts()[page] == locks for page, locks in counts.items())
    for record in sim.runtime.describe()["forks"]["log"]:
        assert record["predicted_pages"] == record["realised_pages"] >= 1
    sim.finish(keeper)
    sim.steps(4)
    kept = request.kv.cache_protected_len
    assert kept < 32, "now it is the last holder"
    assert sim.tree.protected_size() == kept
    sim.finish(request)
    assert sim.accounted() == sim.total


def test_a_hot_prefix_is_masked_not_forked(engine: MakeEngine) -> None:
    sim = engine()
    sharers = [
        admitted(
            sim, f"r{seed}", [*PREFIX, *range(seed * 40, seed * 40 + 3)], shared="auto", seed=seed
        )
        for seed in range(3)
    ]
    sim.steps(6)
    assert all(request.kv.cache_protected_len >= 96 for request in sharers)
    assert all(len(sim.seen(request)) < 70 for request in sharers)
    used = sim.total - sim.allocator.available_size()
    assert used <= 96 + 3 * (8 + 8 + 2 * sim.page_size)


@pytest.mark.parametrize("shares", [True, False])
def test_a_first_fork_lets_those_that_wait_share(engine: MakeEngine, shares: bool) -> None:
    sim = engine()
    request = admitted(sim, "a", PREFIX, shared="auto")
    sim.scheduler.waiting_queue = ["b"]
    sim.steps(1)
    sim.safe_point()
    assert not sim.copies.waiting
    assert sim.runtime.demand.fork_headroom(sim.running) >= 16  # it may come yet
    admitted(sim, "b", [*(PREFIX if shares else OTHER), 1], shared="auto", seed=1)
    sim.steps(3)
    assert (request.kv.cache_protected_len < 32) == (not shares)


def pressed(sim: PrefixEngine, strategies: Sequence[str], left: int) -> dict[str, Any]:
    """Sharers of a long prefix in a pool of which others leave `left` tokens; what became of it."""
    shared = list(range(6000, 6240))
    first = admitted(sim, "first", [*shared, 1], policy="none")
    sim.steps(1)
    sim.finish(first)
    for seed, strategy in enumerate(strategies):
        admitted(sim, f"r{seed}", [*shared, 10 + seed], shared=strategy, seed=seed, keep=0.3)
    while (room := sim.allocator.available_size() - left) >= 16:
        start = 10_000 + 1000 * len(sim.running)
        prompt = range(start, start + min(room, 400) // 16 * 16 - 8)
        admitted(sim, str(start), list(prompt), policy="none")
    sim.steps(5 + LAG)
    assert sim.accounted() == sim.total
    return sim.runtime.describe()


@pytest.mark.parametrize(("other", "forks"), [("auto", 2), ("mask", 0), ("skip", 0)])
def test_sharers_fork_under_pressure_only_if_the_others_will_too(
    engine: MakeEngine, other: str, forks: int
) -> None:
    sim = engine(tokens=3200)
    log = pressed(sim, ["auto", other], 360)["forks"]["log"]
    assert len(log) == forks
    assert sum(record["realised_pages"] for record in log) >= forks
    # Nobody has to leave room for a fork that does not come.
    assert sim.runtime.demand.fork_headroom(sim.running) == 0


def test_sharers_do_not_fork_without_room_for_all(engine: MakeEngine) -> None:
    """The first copy would use up the room of the second, and nothing would come back."""
    sim = engine(tokens=3200)
    left = 240 if sim.page_size > 1 else 140
    found = pressed(sim, ["auto", "auto"], left)
    assert found["forks"]["log"] == []
    assert found["forks"]["decisions"].keys() == {"auto: no room for all"}
    assert sim.runtime.demand.fork_headroom(sim.running) == 0
    masked = pressed(engine(tokens=3200), ["mask", "mask"], left)
    assert found["footprint"] == masked["footprint"]


@pytest.mark.parametrize("end", ["finish", "abort", "retract"])
def test_an_end_during_the_copy_gives_the_lock_back_once(engine: MakeEngine, end: str) -> None:
    sim = engine()
    request = admitted(sim, "a", PREFIX, shared="cow")
    sim.step()
    sim.safe_point()
    (copy,) = sim.copies.waiting
    held = sim.runtime.orphaned_tokens() + sim.runtime.describe()["held_pages"]
    assert held > 0
    if end == "retract":
        sim.retract(request)
    else:
        sim.finish(request, checkpoint=end == "finish")
    assert sim.tree.protected_size() == 0
    assert sim.accounted() == sim.total
    other = admitted(sim, "other", PREFIX, policy="none")
    assert other.prefix_len == 96 - sim.page_size, "the exact prefix is still there"
    copy.finish()
    sim.steps(1)
    assert len(sim.seen(other)) == len(other.tokens)
    if end == "retract":
        assert sim.enter(request)
        sim.steps(4)
        assert request.kv.cache_protected_len == 0
        assert sim.seen(request)
        sim.finish(request)
    sim.finish(other)
    sim.runtime.drain()
    sim.runtime.health.idle(sim.runtime.states.values())
    assert sim.accounted() == sim.total


def test_namespaces_share_nothing(engine: MakeEngine) -> None:
    sim = engine()
    spaces = [{}, {"extra_key": "x"}, {"cache_salt": "x"}]
    for index, space in enumerate(spaces):
        request = admitted(sim, f"r{index}", PREFIX, shared="auto", **space)
        assert request.prefix_len == 0
        sim.steps(1)
    sim.steps(4)
    kept = [request.kv.cache_protected_len for request in sim.running]
    assert max(kept) < 32
    assert sim.tree.evictable_size() == 3 * 96 - sum(kept)
    for request in sim.running:
        assert sim.seen(request)
    for index, space in enumerate(spaces):
        probe = admitted(sim, f"probe{index}", [*PREFIX, 7], policy="none", **space)
        assert probe.prefix_len == 96
        assert len(sim.seen(probe)) == 97
        sim.finish(probe)


def test_a_pruned_request_publishes_nothing_more(engine: MakeEngine) -> None:
    sim = engine()
    request = admitted(sim, "a", PREFIX, shared="cow")
    sim.steps(30)
    tokens = list(request.tokens)
    sim.finish(request)
    assert cached(sim, tokens) == 96
    assert len(sim.tree_pages()) * sim.page_size == 96


def test_publish_never_keeps_the_prompt_private_but_uses_a_hit(engine: MakeEngine) -> None:
    sim = engine()
    first = admitted(sim, "first", PREFIX, policy="none")
    sim.steps(1)
    sim.finish(first)
    request = admitted(sim, "a", [*PREFIX, *OTHER], shared="auto", publish="never")
    assert request.prefix_len >= 96
    sim.steps(5)
    assert request.kv.cache_protected_len < 32
    sim.finish(request)
    assert cached(sim, [*PREFIX, *OTHER]) <= 96 + sim.page_size
    assert sim.accounted() == sim.total


@pytest.mark.parametrize("shared", ["cow", "auto"])
def test_a_cache_full_of_what_nobody_uses_does_not_stop_a_fork(
    engine: MakeEngine, shared: str
) -> None:
    """A server's pool is full of cached prompts most of the time: that is no lack of memory."""
    sim = engine(tokens=880)
    for at in range(8):
        junk = admitted(sim, f"junk{at}", [4000 + 200 * at + i for i in range(96)], policy="none")
        sim.steps(1)
        sim.finish(junk)
    request = admitted(sim, "a", PREFIX, shared=shared)
    sim.steps(1)
    assert sim.allocator.available_size() < sim.total / 8
    usable = sim.allocator.available_size() + sim.tree.evictable_size()
    sim.steps(3)
    assert request.kv.cache_protected_len < 32
    now = sim.allocator.available_size() + sim.tree.evictable_size()
    assert now > usable, "the prefix gives more than its copy takes"
    assert sim.accounted() == sim.total
    assert cached(sim, PREFIX) == 96


@pytest.mark.parametrize("seed", range(4))
def test_a_partial_fork_leaves_the_order_of_eviction_alone(engine: MakeEngine, seed: int) -> None:
    """Neither the part still shared nor the forked one is made hotter than what was used since,
    whichever tokens are dead: a fork starts where a node ends, so none is split."""
    sim = engine(keep=0.2)
    keeper = admitted(sim, "keeper", [*PREFIX, *range(16)], policy="none")
    sim.steps(1)
    own = [*PREFIX, *range(100, 180)]
    forked = admitted(sim, "a", own, shared="auto", seed=seed)
    sim.step()
    hot = admitted(sim, "hot", OTHER, policy="none")
    sim.steps(4)
    assert forked.kv.cache_protected_len == 96
    for request in (hot, forked, keeper):
        sim.finish(request, checkpoint=False)
    evict(sim, sim.tree.evictable_size() - 96)
    assert cached(sim, OTHER) == 96
    assert cached(sim, own) == 0
