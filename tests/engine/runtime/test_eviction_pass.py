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
from vtoken_sglang.core.device_work import WorkAtOnce, WorkBehindForwards
from vtoken_sglang.core.stream_copy import StreamCopyEngine
from vtoken_sglang.engine.observe import decode_tap as observation_tap
from vtoken_sglang.engine.runtime.eviction_pass import EvictionPass
from vtoken_sglang.kernels.attention_mass_ref import attention_mass_ref
from vtoken_sglang.kernels.pack_live_ref import pack_live_ref
from vtoken_sglang.options import RequestOptions, VTokenConfig
from vtoken_sglang.policy.base import Keys, Policy, PolicyError, PolicyView
from vtoken_sglang.policy.eviction import EvictionPlan, plan_eviction

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

    monkeypatch.setattr(observation_tap, "attention_mass", bare(attention_mass_ref))
    monkeypatch.setattr(observation_tap, "pack_live", bare(attention_pack))


def attention_pack(*arguments: Any, max_span: int) -> None:
    rows, row_ids, spans, indptr, slots, positions = arguments
    pack_live_ref(rows, row_ids, spans, indptr, slots, positions, None, max_span=max_span)


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
    at_once = EvictionPass(plain.observer, WorkAtOnce(), torch.device("cpu"))
    at_once.start(plain.row, plain, policy, look_at(plain))
    expected = at_once.arrived(plain.row, plain)
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
    looks = EvictionPass(sim.observer, work, torch.device("cpu"))
    looks.start(sim.row, sim, policy, look_at(sim))
    assert looks.waiting(sim.row)
    assert looks.arrived(sim.row, sim) is None
    assert copied == [1 + len(expected)]
    streams.passed = True
    order = ["forward waits for schedule", "on forward", "event on forward"]
    assert streams.calls[-3:] == order
    assert "host waits" not in streams.calls
    looks.wait()
    assert streams.calls[-1] == "host waits"  # only ever asked for when memory is short
    evicted = looks.arrived(sim.row, sim)
    assert evicted is not None
    assert evicted.tolist() == expected.tolist()
    assert not looks.waiting(sim.row)


class Peeks(Policy):
    reads_keys = Keys.CACHED

    def score(self, view: PolicyView) -> torch.Tensor:
        (first, *_) = view.layer_keys()
        return first.norm(dim=(1, 2)) + float(first[0, 0, 0])


def test_the_stand_in_notices_a_policy_that_reads() -> None:
    sim = Sim(Peeks(), 120, 5, on_device=on_device)
    fill(sim)
    looks = EvictionPass(sim.observer, WorkAtOnce(), torch.device("cpu"))
    with pytest.raises(PolicyError, match="host wait") as caught:
        looks.start(sim.row, sim, Peeks(), look_at(sim))
    assert isinstance(caught.value.__cause__, HostReadError)


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


def test_a_look_of_an_earlier_request_is_dropped() -> None:
    sim = Sim(policy_named("h2o"), 120, 5)
    fill(sim)
    looks = EvictionPass(sim.observer, WorkAtOnce(), torch.device("cpu"))
    looks.start(sim.row, "first", sim.policy, look_at(sim))
    assert looks.arrived(sim.row, "second") is None
    assert not looks.waiting(sim.row)
    looks.start(sim.row, "first", sim.policy, look_at(sim))
    looks.forget(sim.row)
    assert looks.arrived(sim.row, "first") is None


class NotFinite(Policy):
    reads_keys = Keys.CACHED

    def score(self, view: PolicyView) -> torch.Tensor:
        return torch.full(view.positions.shape, float("nan"))


def test_scores_that_are_not_finite_are_refused_when_they_arrive() -> None:
    sim = Sim(NotFinite(), 120, 5)
    looks = EvictionPass(sim.observer, WorkAtOnce(), torch.device("cpu"))
    looks.start(sim.row, sim, NotFinite(), look_at(sim))
    with pytest.raises(PolicyError, match="must be finite"):
        looks.arrived(sim.row, sim)


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
