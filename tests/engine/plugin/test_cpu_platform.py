"""The CPU platform offers itself where nothing better is, and never where something is."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from vtoken_sglang.engine.plugin import cpu_platform
from vtoken_sglang.engine.plugin.cpu_platform import PLATFORM_CLASS, activate

SEEN = ("cuda", "xpu", "mps")
OUT_OF_TREE = ("npu", "musa", "hpu")  # modules that a vendor's package adds to torch


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accelerator, and nothing chosen, whatever this machine is."""
    for name in SEEN:
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda: False)
    for name in OUT_OF_TREE:
        monkeypatch.delattr(torch, name, raising=False)
    monkeypatch.delattr(torch.version, "musa", raising=False)
    for variable in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make torch report an accelerator of a kind."""

    def plug(kind: str) -> None:
        if kind == "musa build":
            monkeypatch.setattr(torch.version, "musa", "4.0", raising=False)
        elif kind in SEEN:
            monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: True)
        else:
            module = SimpleNamespace(is_available=lambda: True)
            monkeypatch.setattr(torch, kind, module, raising=False)

    return plug


def test_a_machine_without_accelerator_is_taken() -> None:
    assert activate() == PLATFORM_CLASS


def test_an_accelerator_package_without_its_device_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in OUT_OF_TREE:
        module = SimpleNamespace(is_available=lambda: False)
        monkeypatch.setattr(torch, name, module, raising=False)
    assert activate() == PLATFORM_CLASS


@pytest.mark.parametrize("chosen", [None, "vtoken_cpu"])
@pytest.mark.parametrize("kind", [*SEEN, *OUT_OF_TREE, "musa build"])
def test_a_machine_with_an_accelerator_is_never_taken(
    plug_in: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    chosen: str | None,
) -> None:
    plug_in(kind)
    if chosen is not None:
        monkeypatch.setenv("SGLANG_PLATFORM", chosen)
    assert activate() is None


@pytest.mark.parametrize("chosen", ["cpu", "cuda", "ascend"])
def test_another_platform_that_the_user_chose_stands(
    monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", chosen)
    assert activate() is None


def test_sglangs_own_cpu_engine_stands_where_the_user_chose_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() is None
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert activate() == PLATFORM_CLASS


def test_ours_may_be_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "vtoken_cpu")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activate() == PLATFORM_CLASS


def test_the_class_is_where_the_path_says() -> None:
    pytest.importorskip("sglang", reason="needs SGLang")
    module, name = PLATFORM_CLASS.rsplit(".", 1)
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_the_entry_point_names_this_function() -> None:
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.platforms", name="vtoken_cpu")
    assert entry.load() is cpu_platform.activate
