"""What policies are made of: sums over neighbours, ranks, and parameters that are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.policy.matrix import make_view
from vtoken_sglang.policy.base import Gather, Observation, Pool, neighbour_sum, ranks
from vtoken_sglang.policy.keydiff_local import KeyDiffLocal
from vtoken_sglang.policy.snapkv import SnapKV
from vtoken_sglang.policy.snapkv_pages import SnapKVPages
from vtoken_sglang.policy.tova import TOVA


@pytest.mark.parametrize("shape", [(1,), (2, 3), (40,), (300, 2, 3)])
@pytest.mark.parametrize("width", [1, 3, 5, 7, 21, 129])
def test_sums_over_neighbours_are_those_of_a_loop(width: int, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(width))
    reach = width // 2
    expected = torch.stack(
        [values[max(0, at - reach) : at + reach + 1].double().sum(0) for at in range(len(values))]
    )
    torch.testing.assert_close(neighbour_sum(values, width), expected.float(), rtol=0, atol=1e-5)


def test_ranks_are_distinct_and_equal_scores_rank_by_position() -> None:
    found = ranks(torch.tensor([0.5, 0.1, 0.5, 0.9, 0.1]))
    assert found.tolist() == pytest.approx([0.4, 0.0, 0.6, 0.8, 0.2])
    assert found.dtype == torch.float32


@pytest.mark.parametrize("width", [0, -1, 2, 128])
@pytest.mark.parametrize(
    "make",
    [lambda width: SnapKV(kernel=width), lambda width: TOVA(kernel=width),
     lambda width: KeyDiffLocal(width=width), lambda width: SnapKVPages(kernel=width)],
)  # fmt: skip
def test_a_width_that_has_no_middle_is_refused(make: Callable[[int], object], width: int) -> None:
    with pytest.raises(ValueError, match="must be an odd number from 1 to 1023"):
        make(width)


def test_observations_that_depend_on_batching_are_refused() -> None:
    with pytest.raises(ValueError, match="needs Gather.PROMPT_END"):
        Observation(Gather.TOTAL, pool=Pool.MAX)
    with pytest.raises(ValueError, match="window must be at least 1"):
        SnapKV(window=0).observation()
    with pytest.raises(ValueError, match="median"):
        SnapKV(pool="median").observation()


def test_tokens_of_a_page_count_alike_and_pages_follow_positions() -> None:
    view = replace(make_view([0, 1, 4, 5, 7, 9, 10, 12], 13), page_size=4, observed_len=12)
    attention = torch.tensor([0.0, 0.3, 0.1, 0.2, 0.0, 0.0, 0.5, 0.0])
    scores = SnapKVPages(kernel=1).score(replace(view, attention=attention))
    assert scores.tolist() == pytest.approx([0.3, 0.3, 0.2, 0.2, 0.2, 0.5, 0.5, 0.5])
