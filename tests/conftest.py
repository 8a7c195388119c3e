"""Fixtures and order of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.reference import Reference

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # every model of the suite is a local folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, servers last; skip what needs a GPU where there is none."""
    items.sort(key=lambda item: item.get_closest_marker("server") is not None)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _cuda_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in gpu_items:
            item.add_marker(skip)


def _cuda_available() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The folder of the small real model, fetched on first use; VTOKEN_TEST_MODEL names another."""
    from vtoken_sglang_eval.models import ensure_smollm2

    chosen = os.environ.get("VTOKEN_TEST_MODEL")
    return Path(chosen) if chosen else ensure_smollm2()


@pytest.fixture(scope="session")
def reference(model_path: Path) -> Reference:
    """The small model in transformers, float32, one thread (a server may run beside it)."""
    import torch

    from tests.helpers.reference import Reference

    torch.set_num_threads(1)

    return Reference.load(model_path)
