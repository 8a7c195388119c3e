"""What follows from a cell: tokens in place of pages, means per fork, no zeros nobody measured."""

from __future__ import annotations

from typing import Any

import pytest
from vtoken_sglang_eval.derived import with_derived_figures

OUTLINED: dict[str, Any] = {
    "config": {"page_size": 16},
    "model": {"name": "tiny", "kv_bytes_per_token": 8},
    "workload": {"name": "agent"},
}
SUMMARY = {
    "freed_pages": 10, "private_pages_per_request": 2.5, "copied_bytes": 80, "retractions": 0,
    "queue": {"count": 1, "p50": 0.0}, "forks": 300, "forks_logged": 256,
    "fork_predicted_pages": 512.0, "fork_realised_pages": 128,
}  # fmt: skip
POOL = [{"retracted": 3.0}, {"retracted": 3.0}, {"retracted": 5.0}]


def summary_of(arm: str = "auto", **outlined: Any) -> dict[str, Any]:
    run = {"arm": arm, "repeat": 0, "summary": SUMMARY, "pool": POOL}
    (made,) = with_derived_figures([run], {**OUTLINED, **outlined})
    assert run["summary"] is SUMMARY  # what was read stays as it was
    summary: dict[str, Any] = made["summary"]
    return summary


@pytest.mark.parametrize(("arm", "size"), [("auto", 16), ("p1", 1), ("unknown", 16)])
def test_pages_of_different_sizes_are_told_in_tokens(arm: str, size: int) -> None:
    found = summary_of(arm)
    assert found["freed_tokens"] == 10 * size
    assert found["private_tokens_per_request"] == 2.5 * size


def test_pages_saved_are_a_mean_over_the_forks_still_in_the_log() -> None:
    found = summary_of()
    assert (found["predicted_pages_per_fork"], found["realised_pages_per_fork"]) == (2.0, 0.5)


def test_bytes_copied_are_left_out_where_the_size_of_a_token_is_not_known() -> None:
    assert summary_of()["copied_bytes"] == 80
    assert "copied_bytes" not in summary_of(model={"name": "org/name"})


def test_what_sglangs_own_client_does_not_tell_is_no_zero() -> None:
    assert summary_of()["retractions"] == 0
    found = summary_of(workload={"name": "generated_shared_prefix", "client": "x"})
    assert "queue" not in found
    assert found["retractions"] == 2.0  # the server's own count
