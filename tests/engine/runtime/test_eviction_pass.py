"""EvictionPass: who dies is decided where the scores are, and the host never waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from tests.helpers.fake_fence import RecordedEvent, RecordedStream, RecordedStreams
from tests.helpers.observed_request import OBSERVING, Sim, policy_named
from tests.helpers.on_device import HostReadError, host_view, on_device
from vtoken_sglang.core import device_work
from vtoken_sglang.core.copy_engine import StreamCopyEngine
from vtoken_sglang.core.device_work import WorkAtOnce, WorkBehindForwards
from vtoken_sglang.engine.observe import decode_tap as observation_tap
from vtoken_sglang.engine.runtime.eviction_pass import Ahead, Asked, EvictionPass, Outcome
from vtoken_sglang.kernels.attention_mass.reference import attention_mass_reference
from vtoken_sglang.kernels.pack_live.reference import pack_live_reference
from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy.base import Policy, PolicyView
from vtoken_sglang.policy.eviction import EvictionPlan, plan_eviction

CPU = torch.device("cpu")
SCORING = [*OBSERVING, "knorm", "keydiff"]
OPTIONS = RequestOptions.resolve(VTokenConfig(policy="h2o", keep=0.5, sink=2, recent=10), None)


class Streams:
    """`torch.cuda` as far as it is used: events pass when the test says so; calls are noted.

    Fields:
        calls: what was enqueued and waited for, in order.
        passed: whether events have passed.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.passed = False

    def Event(self) -> Any:
        record = lambda stream: self.calls.append(f"event on {stream.name}")  # noqa: E731
        wait = lambda: self.calls.append("host waits")  # noqa: E731
        return SimpleNamespace(record=record, query=lambda: self.passed, synchronize=wait)

    def make(self, name: str) -> Any:
        wait = lambda other: self.calls.append(f"{name} waits for {other.name}")  # noqa: E731
        return SimpleNamespace(name=name, wait_stream=wait)

    def current_stream(self) -> Any:
        return self.schedule

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(f"on {stream.name}")
        yield

    @property
    def schedule(self) -> Any:
        self._schedule: Any = getattr(self, "_schedule", None) or self.make("schedule")
        return self._schedule


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel launch reads lengths on the device; its CPU reference may read them on the host."""

    def bare(form: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            plain = [host_view(a) if isinstance(a, torch.Tensor) else a for a in arguments]
            named = {
                name: host_view(value) if isinstance(value, torch.Tensor) else value
                for name, value in options.items()
            }
            form(*plain, **named)

        return launch

    monkeypatch.setattr(observation_tap, "attention_mass", bare(attention_mass_reference))
    monkeypatch.setattr(observation_tap, "pack_live", bare(attention_pack))


def attention_pack(*arguments: Any, max_span: int) -> None:
    rows, row_ids, spans, indptr, slots, positions = arguments
    pack_live_reference(rows, row_ids, spans, indptr, slots, positions, None, max_span=max_span)


def fill(sim: Sim) -> None:
    for start, end in ((0, 37), (37, 60), (60, 90)):
        sim.forward(start, end, 90)
    sim.evict(90, 8)
    for pos in range(90, 110):
        sim.forward(pos, pos + 1, 90)


def look_at(sim: Sim) -> EvictionPlan:
    look = plan_eviction(sim.live(110), logical_len=110, options=OPTIONS, eligible_below=104)
    assert look is not None
    return look


def ask(passes: EvictionPass, sim: Sim, policy: Policy) -> Outcome:
    outcome = Outcome(sim.state)
    passes.select([Asked(outcome, policy, look_at(sim))])
    return outcome


def take(passes: EvictionPass, outcome: Outcome, settle: bool = False) -> Outcome:
    passes.take(outcome, settle)
    return outcome


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", SCORING)
def test_nothing_is_read_back_on_the_decode_path(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Chunks, evictions, decode steps and a look over tensors that refuse to be read; the evicted
    come through the one copy that is made for them, and are the CPU's."""
    policy = policy_named(name)
    plain = Sim(policy, 120, 5)
    fill(plain)
    at_once = EvictionPass(plain.observer, WorkAtOnce(), CPU, 1)
    expected = take(at_once, ask(at_once, plain, policy)).evicted
    assert expected is not None
    assert len(expected) > 30

    streams = Streams()
    work = WorkBehindForwards(streams.make("forward"), streams)
    sim = Sim(policy, 120, 5, tapped=True, on_device=on_device, work=work)
    fill(sim)
    copied: list[int] = []
    empty = torch.empty

    def staging(shape: Any, **options: Any) -> torch.Tensor:
        copied.append(int(np.prod(shape)))
        return empty(shape, **options)

    monkeypatch.setattr(device_work.torch, "empty", staging)
    passes = EvictionPass(sim.observer, work, CPU, 1)
    outcome = ask(passes, sim, policy)
    assert copied == [1 + len(expected)]
    order = ["forward waits for schedule", "on forward", "event on forward"]
    assert streams.calls[-3:] == order
    for _ in range(work.lag - 1):
        passes.run([], Ahead.NEVER)
        assert take(passes, outcome).evicted is None
    assert "host waits" not in streams.calls
    passes.run([], Ahead.NEVER)
    evicted = take(passes, outcome).evicted
    assert evicted is not None
    assert evicted.tolist() == expected.tolist()
    assert sim.state.selection is None


def test_when_memory_is_short_a_selection_is_waited_for() -> None:
    streams = Streams()
    work = WorkBehindForwards(streams.make("forward"), streams)
    sim = Sim(policy_named("h2o"), 120, 5)
    fill(sim)
    passes = EvictionPass(sim.observer, work, CPU, 1)
    outcome = ask(passes, sim, sim.policy)
    assert take(passes, outcome).evicted is None
    assert take(passes, outcome, settle=True).evicted is not None
    assert streams.calls[-1] == "host waits"


def test_requests_asked_in_one_pass_share_one_piece_of_work() -> None:
    """Each gets its own positions out of it, and one that fails takes nobody along."""
    sims = [Sim(policy_named("knorm"), 120, seed) for seed in (1, 2, 3)]
    for sim in sims:
        fill(sim)
    alone = []
    for sim in sims:
        one = EvictionPass(sim.observer, WorkAtOnce(), CPU, 1)
        alone.append(take(one, ask(one, sim, sim.policy)).evicted)
    started: list[int] = []

    class Counted(WorkAtOnce):
        def start(self, work: Any) -> Any:
            started.append(1)
            return super().start(work)

    passes = EvictionPass(sims[0].observer, Counted(), CPU, 1)
    outcomes = [Outcome(sim.state) for sim in sims]
    policies = [sims[0].policy, NotFinite(), sims[2].policy]
    for outcome, sim in zip(outcomes, sims, strict=True):
        outcome.state.sim = sim  # type: ignore[attr-defined]
    passes._observer = ManyObservers()  # type: ignore[assignment]
    passes.select(
        [
            Asked(outcome, policy, look_at(sim))
            for outcome, policy, sim in zip(outcomes, policies, sims, strict=True)
        ]
    )
    assert started == [1]
    found = [take(passes, outcome) for outcome in outcomes]
    for outcome, expected in ((found[0], alone[0]), (found[2], alone[2])):
        assert outcome.evicted is not None
        assert expected is not None
        assert outcome.evicted.tolist() == expected.tolist()
    assert found[1].error is not None
    assert found[1].state.failed


class ManyObservers:
    """Each simulated request has keys of its own."""

    def see(self, state: Any, policy: Policy, view: PolicyView) -> PolicyView:
        return state.sim.observer.see(state, policy, view)  # type: ignore[no-any-return]


class Peeks(Policy):
    reads_keys = True

    def score(self, view: PolicyView) -> torch.Tensor:
        (first, *_) = view.layer_keys()
        return first.norm(dim=(1, 2)) + float(first[0, 0, 0])


def test_the_stand_in_notices_a_policy_that_reads() -> None:
    sim = Sim(Peeks(), 120, 5, on_device=on_device)
    fill(sim)
    passes = EvictionPass(sim.observer, WorkAtOnce(), CPU, 1)
    error = take(passes, ask(passes, sim, Peeks())).error
    assert error is not None
    assert "host wait" in str(error)
    assert isinstance(error.__cause__, HostReadError)


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.to("cpu"),
        lambda tensor: bool(tensor.any()),
        lambda tensor: int(tensor[0]),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: np.asarray(tensor),
        lambda tensor: (tensor + 1).numpy(),
    ],
)
def test_the_stand_in_refuses_every_kind_of_read(read: Any) -> None:
    with pytest.raises(HostReadError):
        read(on_device(torch.arange(4)))


class NotFinite(Policy):
    reads_keys = True

    def score(self, view: PolicyView) -> torch.Tensor:
        return torch.full(view.positions.shape, float("nan"))


def test_scores_that_are_not_finite_are_refused_when_they_arrive() -> None:
    sim = Sim(NotFinite(), 120, 5)
    passes = EvictionPass(sim.observer, WorkAtOnce(), CPU, 1)
    error = take(passes, ask(passes, sim, NotFinite())).error
    assert error is not None
    assert "must be finite" in str(error)


def test_a_copy_waits_for_a_look_that_still_reads_keys() -> None:
    """A look reads keys behind the last forward. Pages that its row gives up at the same safe point
    may be the destinations of the next copy, which must not overwrite what is being read."""
    streams = RecordedStreams()
    copier = StreamCopyEngine(
        torch.device("cpu"), streams=streams, copy=lambda *_: streams.log.append("copies")
    )
    copier.note_forward(RecordedEvent(streams, "forward"))
    work = WorkBehindForwards(None, ForwardsOn(streams), note=copier.note_forward)

    def read_keys() -> torch.Tensor:
        streams.log.append("look reads keys")
        return torch.zeros(1)

    work.start(read_keys)
    slots = np.array([3], np.int64)
    copier.submit([torch.zeros(8, 1, 1)], slots, slots + 1)
    assert streams.log == [
        "look reads keys",
        "forward stream records event1",
        "copy waits event1",
        "copies",
        "copy records event2",
    ]


class ForwardsOn:
    """`RecordedStreams` whose current stream is the one that forwards run on."""

    def __init__(self, streams: RecordedStreams) -> None:
        self._streams = streams
        self._current = RecordedStream(streams, "forward stream")

    def Event(self) -> Any:
        return self._streams.Event()

    def current_stream(self) -> Any:
        return self._current

    def stream(self, stream: Any) -> Any:
        return self._streams.stream(stream)
