"""Who holds which tree page."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from vtoken_sglang.engine.sharing.forks import PageHolders


def test_holders_are_counted_by_page() -> None:
    draw = np.random.default_rng(0)
    held = [np.sort(draw.choice(40, 9, replace=False)) for _ in range(5)]
    able = [held[0], held[3]]
    found = PageHolders.of(held, able)
    asked = np.arange(45)
    counted = Counter(page for pages in held for page in pages.tolist())
    forking = Counter(page for pages in able for page in pages.tolist())
    assert found.all_of(asked).tolist() == [max(1, counted[page]) for page in range(45)]
    assert found.pruning_of(asked).tolist() == [forking[page] for page in range(45)]
    assert PageHolders.of([], []).all_of(asked).tolist() == [1] * 45
