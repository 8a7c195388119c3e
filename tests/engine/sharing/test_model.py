"""Random lives of many requests over one tree, against a model of tree, locks and rows.

The model knows three things: what bytes a token must have (from everything before it), which pages
each request's lock covers, and the bytes of every page while it is in the tree. SGLang's tree,
allocator and rows must agree with it after every step, whatever forks, ends or is evicted.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from tests.helpers.prefix_engine import PrefixEngine, TreeRequest
from vtoken_sglang.options import VTokenConfig

POOL_TOKENS = 1024
OPTIONS = st.fixed_dictionaries(
    {
        "shared": st.sampled_from(["auto", "cow", "auto", "cow", "mask", "skip"]),
        "policy": st.sampled_from(["random", "random", "streaming_llm", "none"]),
        "publish": st.sampled_from(["prompt", "prompt", "never"]),
        "keep": st.sampled_from([0.2, 0.5, 0.8]),
        "interval": st.sampled_from([1, 4]),
    }
)
# A reference's prompt equals that of every reference of its family and lengths.
ARRIVAL = st.fixed_dictionaries(
    {
        "family": st.integers(0, 1),
        "length": st.sampled_from([100, 64, 144, 30, 0]),
        "tail": st.sampled_from([40, 70, 1]),
        "reference": st.booleans(),
        "sharers": st.sampled_from([1, 1, 2, 3]),
        "space": st.sampled_from([{}, {}, {}, {"extra_key": "x"}, {"cache_salt": "x"}]),
        "options": OPTIONS,
    }
)


class SharedPrefixes(RuleBasedStateMachine):
    """One life of a server.

    Fields:
        core, page_size: set by the subclasses.
        outcomes: what the examples came across, so that the test cannot pass by missing it.
        locked: tree pages under each running request's lock.
        cached: pages of the tree at the last look. memory: what all pages held then.
        evicted: whether the tree gave pages up since.
    """

    core = "python"
    page_size = 16
    outcomes: Counter[str] = Counter()

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        config = VTokenConfig(policy="random", keep=0.5, sink=2, recent=6, check=True)
        self.sim = PrefixEngine(
            self.patch,
            config,
            page_size=self.page_size,
            pages=POOL_TOKENS // self.page_size,
            core=self.core,
        )
        self.waiting: list[TreeRequest] = []
        self.locked: dict[TreeRequest, list[int]] = {}
        self.cached: set[int] = set()
        self.memory = self.sim.memory()
        self.evicted = False
        evict = self.sim.tree.evict

        def evict_and_note(parameters: EvictParams) -> Any:
            self.evicted = True
            return evict(parameters)

        self.patch.setattr(self.sim.tree, "evict", evict_and_note)
        self.admitted = 0

    @property
    def running(self) -> list[TreeRequest]:
        return self.sim.running

    # -- what may happen ------------------------------------------------------------------------

    @rule(arrivals=st.lists(ARRIVAL, min_size=1, max_size=3), turns=st.integers(0, 2))
    def arrive(self, arrivals: list[dict[str, Any]], turns: int) -> None:
        """Requests come, often with the prefix of one that is there, and decode a little."""
        for arrival in arrivals:
            base = [arrival["family"] * 1000 + i for i in range(arrival["length"])]
            options = dict(arrival["options"])
            if options["policy"] == "none":
                del options["keep"]
            for _ in range(arrival["sharers"]):
                self.admitted += 1
                own = 5000 + self.admitted * 100 * (not arrival["reference"])
                prompt = base + [own + i for i in range(arrival["tail"])]
                options["seed"] = self.admitted  # other tokens die in each
                self.sim.admit(f"r{self.admitted}", prompt, **arrival["space"], **options)
        self.turn([False] * turns)

    @rule(copies=st.lists(st.booleans(), min_size=1, max_size=4))
    def turn(self, copies: list[bool]) -> None:
        """Turns of the loop; `copies`: whether the copies in flight are over by the end of each."""
        for over in copies:
            self.waiting += self.sim.step()
            if over:
                self.sim.run_copies()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), how=st.sampled_from(["finish", "abort", "retract"]))
    def end(self, data: st.DataObject, how: str) -> None:
        """One request ends, during its copy if there is such a one; or one copy ends."""
        copying = [request for request in self.running if self.copying(request)]
        request = data.draw(st.sampled_from(copying or self.running))
        self.outcomes["ended"] += bool(copying)
        if how == "retract":
            self.waiting.append(self.sim.retract(request))
        else:
            self.sim.finish(request, checkpoint=how == "finish" and not request.fresh)

    @rule(data=st.data(), tokens=st.sampled_from([1, 40, POOL_TOKENS]))
    def commit_then_evict(self, data: st.DataObject, tokens: int) -> None:
        """Copies end, and the tree evicts in the safe point that unlocks what they replace."""
        for copy in self.sim.copies.waiting:
            if data.draw(st.booleans()):
                copy.finish()
        self.sim.safe_point()
        self.sim.tree.evict(EvictParams(num_tokens=tokens))

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self) -> None:
        if self.sim.enter(self.waiting[0]):
            self.waiting.pop(0)

    def drain(self) -> None:
        """Everyone ends; what is left is free or cached, and nobody holds it."""
        for request in list(self.running):
            self.sim.finish(request, checkpoint=not request.fresh)
        self.sim.runtime.drain()
        self.sim.runtime.health.idle(self.sim.runtime.states.values())
        assert self.sim.tree.protected_size() == 0
        free, cached = self.sim.allocator.available_size(), self.sim.tree.evictable_size()
        assert free + cached == POOL_TOKENS

    def copying(self, request: TreeRequest) -> bool:
        return request.kv.req_pool_idx in self.sim.runtime.reclaimer.copies.pending

    @invariant()
    def note_what_happened(self) -> None:
        if not hasattr(self, "sim"):
            return
        plans = [c.plan for c in self.sim.runtime.reclaimer.copies.pending.values()]
        forks = [plan for plan in plans if plan.new_protected_len is not None]
        self.outcomes["forks"] += len(forks)
        self.outcomes["partial"] += any(plan.new_protected_len for plan in forks)
        self.outcomes["two at once"] += len(forks) > 1
        sources = [set((plan.src_slots // self.page_size).tolist()) for plan in forks]
        self.outcomes["same pages"] += any(
            one & other for at, one in enumerate(sources) for other in sources[at + 1 :]
        )

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def rows_hold_what_was_written(self) -> None:
        if not hasattr(self, "sim"):
            return
        for request in self.running:
            live = self.sim.seen(request)
            if request.sampling_params.custom_params["vtoken"]["policy"] == "none":
                assert len(live) == request.kv.kv_allocated_len

    @invariant()
    def the_pool_adds_up(self) -> None:
        if hasattr(self, "sim"):
            assert self.sim.accounted() == POOL_TOKENS
            free = self.sim.allocator.get_all_free_pages().tolist()
            assert len(set(free)) == len(free)
            assert not set(free) & set(self.sim.tree_pages())

    @invariant()
    def cached_pages_keep_their_bytes(self) -> None:
        if not hasattr(self, "sim"):
            return
        tree, memory = set(self.sim.tree_pages()), self.sim.memory()
        same = self.cached & tree
        if self.evicted:
            # A page may have left the tree and come back for another prefix: not a locked one.
            same &= {page for pages in self.locked.values() for page in pages}
        else:
            assert self.cached <= tree
            self.outcomes["unlocked pages compared"] += len(same) > len(
                {page for pages in self.locked.values() for page in pages}
            )
        order = sorted(same)
        assert (memory[order] == self.memory[order]).all()
        self.cached, self.memory, self.evicted = tree, memory, False

    @invariant()
    def locks_cover_exactly_what_is_shared(self) -> None:
        if not hasattr(self, "sim"):
            return
        before, self.locked = self.locked, {}
        for request in self.running:
            kept = request.kv.cache_protected_len // self.page_size
            known = before.get(request, [])
            self.locked[request] = known[:kept] if len(known) >= kept else self.read(request, kept)
        holders = Counter(page for pages in self.locked.values() for page in pages)
        assert self.sim.tree.protected_size() == len(holders) * self.page_size
        assert holders.keys() <= set(self.sim.tree_pages())
        counted = self.sim.holder_counts()
        assert {page: int(n) for page, n in enumerate(counted) if n} == holders
        if self.core == "python":
            locks = self.sim.lock_counts()
            assert {page: n for page, n in locks.items() if n} == holders

    def read(self, request: TreeRequest, pages: int) -> list[int]:
        """Page ids of a row's tree-owned part, through its tree node: the row may have holes."""
        slots = self.sim.tree.path_device_indices(request.lock.node).tolist()
        found = [slot // self.page_size for slot in slots[:: self.page_size]]
        assert len(found) == pages, (len(found), pages)
        return found

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.drain()
            self.patch.undo()


CASES = [("python", 16), ("rust", 16), ("python", 1), ("rust", 1)]


@pytest.mark.parametrize(("core", "page_size"), CASES)
def test_random_lives_agree_with_the_model(core: str, page_size: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type(
        "Machine", (SharedPrefixes,), {"core": core, "page_size": page_size, "outcomes": Counter()}
    )
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            phases=[Phase.generate],
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    wanted = ("forks", "partial", "two at once", "same pages", "ended", "unlocked pages compared")
    missing = [outcome for outcome in wanted if not machine.outcomes[outcome]]
    assert not missing, machine.outcomes
