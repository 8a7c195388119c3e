"""Requests of different LoRA adapters share no prefix: SGLang keys the tree by the adapter, and a
fork in one namespace never touches what another one holds."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.common import _req_radix_key
from sglang.srt.sampling.sampling_params import SamplingParams

from tests.helpers.prefix_engine import PrefixEngine, TreeRequest
from vtoken_sglang.options import VTokenConfig

ADAPTERS = (None, "a", "b")
PREFIX = list(range(1000, 1096))


def extra_key_of(lora_id: str | None, extra_key: str | None = None) -> str | None:
    """What SGLang makes of the adapter."""
    found: str | None = sglang_request(lora_id, extra_key).extra_key
    return found


def sglang_request(lora_id: str | None, extra_key: str | None = None) -> Req:
    parameters = SamplingParams(temperature=0, max_new_tokens=1)
    return Req("r", "", array("q", PREFIX), parameters, lora_id=lora_id, extra_key=extra_key)


@pytest.fixture(params=["python-16", "rust-16", "python-1", "rust-1"])
def sim(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PrefixEngine:
    core, size = request.param.split("-")
    config = VTokenConfig(policy="random", keep=0.4, sink=0, recent=8, interval=1, check=True)
    pages = 1600 // int(size)
    return PrefixEngine(monkeypatch, config, page_size=int(size), pages=pages, core=core)


def admit(sim: PrefixEngine, rid: str, adapter: str | None, **options: str) -> TreeRequest:
    request = sim.admit(rid, PREFIX, extra_key=extra_key_of(adapter), **options)
    assert request is not None
    return request


def tree_owned_pages(sim: PrefixEngine, request: TreeRequest) -> list[int]:
    """Ids of the pages whose lock the request holds; call before anything of them is dead."""
    row = sim.rows.req_to_token[request.kv.req_pool_idx]
    entries = row[: request.kv.cache_protected_len : sim.page_size]
    pages: list[int] = (entries // sim.page_size).tolist()
    assert 0 not in pages
    return pages


def test_sglang_keys_prefixes_by_adapter(sim: PrefixEngine) -> None:
    assert len({extra_key_of(adapter) for adapter in ADAPTERS}) == 3
    assert len({extra_key_of(adapter, "tenant") for adapter in ADAPTERS}) == 3
    keys = [
        _req_radix_key(sim.tree, sglang_request(adapter), array("q", PREFIX))
        for adapter in ADAPTERS
    ]
    for at, key in enumerate(keys):
        for other in keys[at + 1 :]:
            with pytest.raises(ValueError, match="matching extra_key"):
                key.match(other)


@pytest.mark.parametrize("shared", ["cow", "auto"])
def test_a_fork_of_one_adapter_touches_no_page_of_the_others(
    sim: PrefixEngine, shared: str
) -> None:
    holders = {name: admit(sim, f"holder {name}", name, policy="none") for name in ADAPTERS}
    assert [request.prefix_len for request in holders.values()] == [0, 0, 0]
    sim.steps(1)
    pages = {adapter: tree_owned_pages(sim, request) for adapter, request in holders.items()}
    together = [page for own in pages.values() for page in own]
    assert len(together) == len(set(together)) == 3 * (96 // sim.page_size)
    sim.finish(holders.pop("a"), checkpoint=False)
    before = sim.memory()[pages[None] + pages["b"]]

    forking = admit(sim, "forking", "a", shared=shared)
    assert forking.prefix_len == 96 - sim.page_size
    sim.steps(4)
    assert forking.kv.cache_protected_len < 32
    assert sim.runtime.describe()["forks"]["committed"] == 1
    # It was the last holder of its namespace, whatever the others hold of the same tokens.
    assert sim.tree.protected_size() == 2 * 96 + forking.kv.cache_protected_len
    assert sim.tree.evictable_size() == 96 - forking.kv.cache_protected_len
    for adapter, request in holders.items():
        assert tree_owned_pages(sim, request) == pages[adapter]
        assert len(sim.seen(request)) == len(request.tokens)
    assert np.array_equal(sim.memory()[pages[None] + pages["b"]], before)

    for adapter in ADAPTERS:
        probe = admit(sim, f"probe {adapter}", adapter, policy="none")
        assert tree_owned_pages(sim, probe) == pages[adapter][: probe.prefix_len // sim.page_size]
        assert probe.prefix_len == 96 - sim.page_size
        assert len(sim.seen(probe)) == 96
        sim.finish(probe, checkpoint=False)
    assert sim.seen(forking)
    assert sim.accounted() == sim.total
