"""Sentences of the table: a gain is one only if every repeat says so, and losses are told."""

from __future__ import annotations

from typing import Any

from vtoken_sglang_eval.findings import findings


def row(study: str, arm: str, ratios: dict[str, Any], **figures: float) -> dict[str, Any]:
    medians = {name: {"median": value} for name, value in figures.items()}
    return {"study": study, "arm": arm, "figures": medians, "ratios": ratios}


def throughput(median: float, least: float, most: float) -> dict[str, Any]:
    return {"output_tokens_per_s": {"median": median, "min": least, "max": most}}


def test_gains_losses_and_neither_are_told_apart() -> None:
    rows = [
        row("a", "auto", {"skip": throughput(1.5, 1.2, 1.8)}, copied_bytes=2e6, forks=3),
        row("b", "auto", {"skip": throughput(1.1, 0.9, 1.3)}),
        row("c", "auto", {"skip": throughput(0.8, 0.7, 0.9)}),
        row("c", "skip", {}),
    ]
    answers = dict(findings(rows))
    first = answers["When does copy-on-write (auto) beat skip, and by how much?"]
    assert "More tokens per second than skip in every repeat: a 1.50 [1.20, 1.80]." in first
    assert "Fewer than skip in every repeat: c 0.80 [0.70, 0.90]." in first
    assert "No clear difference to skip: b 1.10 [0.90, 1.30]." in first
    assert (
        "a: 2.00 MB copied, 3 forks (pages saved: 0 predicted"
        in answers["What does copy-on-write cost?"]
    )


def test_page_size_one_is_set_beside_the_best_that_repacks() -> None:
    rows = [
        row("a", "p1-never", {}, output_tokens_per_s=12.0),
        row("a", "auto", {"p1": throughput(2.0, 1.5, 2.5)}, output_tokens_per_s=8.0),
        row("a", "publish-never", {}, output_tokens_per_s=10.0),
    ]
    answer = dict(findings(rows))["When is plain page size 1 the better choice?"]
    assert "than p1 in every repeat: a 2.00 [1.50, 2.50]" in answer
    assert "a 1.20 of publish-never's" in answer


def test_without_arms_nothing_is_said() -> None:
    assert findings([row("a", "native", {})]) == []
