"""The short list of configurations really covers every pair of settings."""

from __future__ import annotations

import itertools

from tests.served.configurations import CONFIGURATIONS


def test_every_pair_of_settings_occurs_together() -> None:
    names = ["page_size", "radix", "chunked", "overlap"]
    values = {name: {getattr(c, name) for c in CONFIGURATIONS} for name in names}
    assert values["page_size"] == {1, 16, 64}
    for first, second in itertools.combinations(names, 2):
        met = {(getattr(c, first), getattr(c, second)) for c in CONFIGURATIONS}
        assert met == set(itertools.product(values[first], values[second])), (first, second)
    quick = [c for c in CONFIGURATIONS if not c.slow]
    assert {name: {getattr(c, name) for c in quick} for name in names} == values
