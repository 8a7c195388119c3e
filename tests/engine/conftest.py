"""Fixtures of the engine's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.helpers.fake_engine import FakeEngine, MakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Make a fake engine whose server keeps a window of 48 tokens, with every check on."""
    from tests.helpers.fake_engine import WINDOW, FakeEngine
    from vtoken_sglang.options import VTokenConfig

    def make(page_size: int = 16, pages: int = 64, **settings: Any) -> FakeEngine:
        config = VTokenConfig(**{**WINDOW, "interval": 1, "check": True, **settings})
        return FakeEngine(monkeypatch, config, page_size, pages)

    return make
