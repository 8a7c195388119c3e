"""Sentences of the table: a gain is one only if every repeat says so, and losses are told."""

from __future__ import annotations

from typing import Any

import pytest
from vtoken_sglang_eval.findings import findings

SKIP = "When does copy-on-write beat skip, and by how much?"
COST = "What does copy-on-write (auto) cost?"
PAGE_SIZE_1 = "When is plain page size 1 the better choice?"
SHORT = "What is this table short of?"


def row(
    study: str,
    arm: str,
    ratios: dict[str, Any],
    repeats: int = 3,
    failed: int = 0,
    **figures: float,
) -> dict[str, Any]:
    medians = {name: {"median": value} for name, value in figures.items()}
    return {
        "study": study, "arm": arm, "repeats": repeats, "repeats_planned": 3, "failed": failed,
        "figures": medians, "ratios": ratios,
    }  # fmt: skip


def throughput(median: float, least: float, most: float, repeats: int = 3) -> dict[str, Any]:
    ratio = {"median": median, "min": least, "max": most, "repeats": repeats}
    return {"output_tokens_per_s": ratio}


def test_gains_losses_and_neither_are_told_apart() -> None:
    rows = [
        row("a", "auto", {"skip": throughput(1.5, 1.2, 1.8)}),
        row("b", "auto", {"skip": throughput(1.1, 0.9, 1.3)}),
        row("c", "auto", {"skip": throughput(0.8, 0.7, 0.9)}),
        row("c", "skip", {}),
        row("d", "auto", {"skip": throughput(1.0, 1.0, 1.0)}),
        row("e", "auto", {"skip": throughput(1.03, 1.01, 1.05)}),
        row("f", "auto", {"skip": throughput(0.97, 0.96, 0.99)}),
        row("g", "auto", {"skip": throughput(1.5, 1.4, 1.6, repeats=2)}),
    ]
    assert dict(findings(rows))[SKIP] == [
        "auto: more tokens per second than skip in every repeat: a 1.50 [1.20, 1.80].",
        "auto: fewer than skip in every repeat: c 0.80 [0.70, 0.90].",
        "auto: no clear difference to skip: b 1.10 [0.90, 1.30]; d 1.00 [1.00, 1.00]; "
        "e 1.03 [1.01, 1.05]; f 0.97 [0.96, 0.99].",
        "auto: fewer than three repeats, so no answer yet, of skip's: g 1.50 [1.40, 1.60].",
    ]


def test_one_repeat_is_no_gain_and_a_study_without_a_pair_is_named() -> None:
    rows = [
        row("a", "auto", {"skip": throughput(1.5, 1.5, 1.5, repeats=1)}),
        row("b", "auto", {"naive": throughput(1.5, 1.5, 1.5)}),
        row("c", "native", {}),
    ]
    assert dict(findings(rows))[SKIP] == [
        "auto: fewer than three repeats, so no answer yet, of skip's: a 1.50 [1.50, 1.50].",
        "auto: not measured beside skip: b; c.",
    ]


def test_forced_copy_on_write_is_told_beside_the_rule() -> None:
    rows = [row("a", "cow", {"skip": throughput(0.7, 0.6, 0.8)})]
    assert dict(findings(rows))[SKIP] == [
        "cow: fewer than skip in every repeat: a 0.70 [0.60, 0.80]."
    ]


def test_arms_that_should_evict_the_same_are_told_to_answer_alike_or_not() -> None:
    def answered(different: int) -> dict[str, Any]:
        return {
            "reference": "naive", "requests": 24, "different": different, "mismatched": different,
            "evictions": {"evicted": 9, "reference_evicted": 12, "early_evictions": 5},
        }  # fmt: skip

    same = answered(0)
    same["evictions"]["evicted"] = 12
    rows = [
        row("a", "auto", {}) | {"same_evictions": same},
        row("b", "auto", {}) | {"same_evictions": answered(0)},
        row("b", "publish-never", {}) | {"same_evictions": answered(10)},
        row("b", "naive", {}),
    ]
    assert dict(findings(rows))["Do arms that should evict the same tokens answer alike?"] == [
        "auto: all answers equal naive's: a 24; b 24 (though 9 tokens were evicted, not 12).",
        "b: publish-never: 10 of 24 answers differ from naive's to the same prompt, 10 in all. "
        "Other tokens were evicted: 9, naive 12. 5 looks came ahead of the interval, the pool "
        "being short.",
    ]


def test_what_is_missing_and_what_failed_comes_first() -> None:
    rows = [
        row("a", "auto", {}, repeats=2), row("a", "mask", {}, repeats=2),
        row("a", "skip", {}), row("b", "skip", {}, failed=4),
    ]  # fmt: skip
    assert findings(rows)[0] == (
        SHORT,
        [
            "Fewer repeats than planned: a 2 of 3 (auto, mask).",
            "Requests failed, so not all did the same work: b skip 4.",
        ],
    )
    assert SHORT not in dict(findings([row("a", "auto", {"skip": throughput(1, 1, 1)})]))


def test_the_cost_names_copies_forks_and_quality_beside_skip_and_full_attention() -> None:
    cpu = {"server_cpu_ms_per_token": {"median": 1.1, "min": 1.0, "max": 1.2, "repeats": 3}}
    rows = [
        row("a", "native", {}, recall=0.75, agreement=1.0),
        row("a", "skip", {}, recall=0.5, agreement=0.6),
        row(
            "a", "auto", {"skip": cpu}, copied_bytes=2e6, forks=3, recall=0.25, agreement=0.4,
            predicted_pages_per_fork=6.5, realised_pages_per_fork=6.0,
        ),
        row("b", "auto", {}, forks=0),
        row("c", "auto", {}),
    ]  # fmt: skip
    assert dict(findings(rows))[COST] == [
        "a: 2.00 MB copied, 3 forks (pages saved by each: 6.50 predicted, 6.00 realised), "
        "server CPU per token 1.10 [1.00, 1.20] of skip's, "
        "recall 25.0 % (skip 50.0 %, native 75.0 %), agreement with native 40.0 % (skip 60.0 %).",
        "b: 0 forks.",
    ]


def test_page_size_one_is_set_beside_auto_and_the_best_that_repacks() -> None:
    held = {"used_tokens_per_request": {"median": 1.3, "min": 1.2, "max": 1.4, "repeats": 3}}
    rows = [
        row("a", "p1", {"auto": {**throughput(1.2, 1.1, 1.3), **held}}),
        row(
            "a", "p1-never",
            {"auto": throughput(2.0, 1.5, 2.5), "publish-never": throughput(1.2, 0.9, 1.4)},
        ),
        row("a", "auto", {}, output_tokens_per_s=8.0),
        row("a", "publish-never", {}, output_tokens_per_s=10.0),
        row("b", "auto", {}),
    ]  # fmt: skip
    assert dict(findings(rows))[PAGE_SIZE_1] == [
        "p1: more tokens per second than auto in every repeat: a 1.20 [1.10, 1.30].",
        "p1: not measured beside auto: b.",
        "p1-never: more tokens per second than auto in every repeat: a 2.00 [1.50, 2.50].",
        "p1-never: not measured beside auto: b.",
        "p1-never: tokens per second against the best that repacks, by its median: "
        "a 1.20 [0.90, 1.40] of publish-never's.",
        "p1: pool tokens held, of auto's: a 1.30 [1.20, 1.40].",
    ]


@pytest.mark.parametrize("arm", ["publish-never", "reclaim-sync"])
def test_other_variants_are_compared_with_auto(arm: str) -> None:
    found = findings([row("a", arm, {"auto": throughput(0.9, 0.8, 0.95)})])
    assert [answer for _, answer in found] == [
        [f"{arm}: fewer than auto in every repeat: a 0.90 [0.80, 0.95]."]
    ]


def test_without_arms_nothing_is_said() -> None:
    assert findings([row("a", "native", {})]) == []
