"""What the flashinfer backend shows: decode eager and captured, extend, and nothing unasked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from tests.helpers.attention_batches import (
    LAYERS,
    Geometry,
    Lanes,
    cuda_replaced,
    make_batch,
    make_layer,
    make_runner,
    place,
    random_qkv,
)
from tests.helpers.tapped_backend import (
    ask_for_observation,
    check_decode,
    decode_all_layers,
    expected_mass,
    watch,
)
from vtoken_sglang.engine.attention.flashinfer import VTokenFlashInferAttnBackend
from vtoken_sglang.engine.observe import backend_mixin as observation_backends
from vtoken_sglang.engine.observe import forward_link as observation_link

GEOMETRY = Geometry(q_heads=6, kv_heads=2, page_size=4)
PREFIX = [40, 60, 130, 5]


@pytest.fixture(autouse=True)
def _cuda() -> Iterator[None]:
    with cuda_replaced():
        yield


def make(evicted_share: float = 0.5) -> tuple[SimpleNamespace, VTokenFlashInferAttnBackend, Lanes]:
    runner = make_runner(GEOMETRY)
    backend = VTokenFlashInferAttnBackend(runner)
    lanes = place(runner, Lanes(prefix=PREFIX, own=[1] * len(PREFIX)), evicted_share=evicted_share)
    return runner, backend, lanes


@pytest.mark.parametrize(("layers", "observed"), [("all", [0, 1]), ("last", [1])])
@pytest.mark.parametrize("evicted_share", [0.0, 0.5])
def test_decode(
    monkeypatch: pytest.MonkeyPatch, evicted_share: float, layers: str, observed: list[int]
) -> None:
    ask_for_observation(monkeypatch, layers)
    runner, backend, lanes = make(evicted_share)
    check_decode(backend, runner, lanes, GEOMETRY, observed)


def test_an_unwatched_step_runs_the_stock_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for_observation(monkeypatch)
    runner, backend, lanes = make()
    batch = make_batch(runner, lanes, ForwardMode.DECODE)
    backend.init_forward_metadata(batch)
    monkeypatch.setattr(observation_backends, "LseKept", None)  # would fail if it were used
    decode_all_layers(backend, batch, GEOMETRY)
    assert not bool(backend.tap.scores.any())


def test_without_a_policy_or_layers_there_is_no_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backend, _ = make()
    assert backend.tap is None
    ask_for_observation(monkeypatch, "none")
    _, backend, _ = make()
    assert backend.tap is None


def test_the_answer_is_the_stock_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, backend, lanes = make()
    batch = make_batch(runner, lanes, ForwardMode.DECODE)
    backend.init_forward_metadata(batch)
    _, stock = decode_all_layers(backend, batch, GEOMETRY)
    ask_for_observation(monkeypatch)
    runner, backend, lanes = make()
    batch = make_batch(runner, lanes, ForwardMode.DECODE)
    watch(backend, batch, lanes, {0: 1, 1: 2, 2: 3, 3: 4})
    backend.init_forward_metadata(batch)
    _, observed = decode_all_layers(backend, batch, GEOMETRY)
    assert all(torch.equal(a, b) for a, b in zip(stock, observed, strict=True))


def test_a_captured_step_observes_whoever_is_watched_when_it_is_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At capture nobody is; each replay runs the same calls, here again by hand."""
    ask_for_observation(monkeypatch)
    runner, backend, lanes = make()
    capturing: Any = True
    monkeypatch.setattr(observation_backends, "get_is_capture_mode", lambda: capturing)
    batch = make_batch(runner, lanes, ForwardMode.DECODE)
    backend.init_forward_metadata(batch)
    decode_all_layers(backend, batch, GEOMETRY)
    assert not bool(backend.tap.scores.any())
    assert backend.tap.q_heads == GEOMETRY.q_heads
    watch(backend, batch, lanes, {2: 5})
    queries, _ = decode_all_layers(backend, batch, GEOMETRY)
    expected = expected_mass(runner, lanes, 2, queries, [0, 1])
    got = backend.tap.scores[5, : len(expected)].double()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_extend_shows_every_layers_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_for_observation(monkeypatch)
    runner = make_runner(GEOMETRY)
    backend = VTokenFlashInferAttnBackend(runner)
    lanes = place(runner, Lanes(prefix=[0, 30], own=[20, 7]), evicted_share=0.5)
    batch = make_batch(runner, lanes, ForwardMode.EXTEND)
    seen: list[tuple[int, torch.Size, float]] = []
    show = lambda layer, q, scale: seen.append((layer, q.shape, scale))  # noqa: E731
    observed = {batch.kv_loc_plan: SimpleNamespace(show=show)}
    monkeypatch.setattr(observation_link, "_observed", observed)
    backend.init_forward_metadata(batch)
    for layer_id in range(LAYERS):
        q, k, v = random_qkv(GEOMETRY, 27, seed=layer_id)
        backend.forward_extend(q, k, v, make_layer(GEOMETRY, layer_id), batch)
    shape = torch.Size((27, GEOMETRY.q_heads, GEOMETRY.dim))
    assert seen == [(layer, shape, GEOMETRY.dim**-0.5) for layer in range(LAYERS)]
