"""What the full table says about copy-on-write, put into words from its rows alone.

A study counts as a gain or a loss only where every repeat says so; all others are "no clear
difference". Each paragraph names the studies, so nothing that speaks against an arm is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .table import number

Row = Mapping[str, Any]
THROUGHPUT, HELD, CPU = "output_tokens_per_s", "used_tokens_per_request", "server_cpu_ms_per_token"
REPACKING = ("skip", "mask", "cow", "auto", "publish-never")


def findings(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Questions and their answers, as far as the table has the arms for them."""
    auto = [row for row in rows if row["arm"] == "auto"]
    answers = [
        ("When does copy-on-write (auto) beat skip, and by how much?", _against(auto, "skip")),
        ("What memory does a running request hold?", _memory(auto)),
        ("What does copy-on-write cost?", _cost(auto)),
        (
            "When is plain page size 1 the better choice?",
            " ".join(filter(None, (_against(auto, "p1"), _p1_never(rows)))),
        ),
        ("What does reclaiming bring at all, against eviction alone?", _against(auto, "naive")),
    ]
    return [(question, answer) for question, answer in answers if answer]


def _against(ours: Sequence[Row], reference: str) -> str:
    """Throughput of auto over a reference, study by study: gains, losses, and neither."""
    groups: dict[str, list[str]] = {"gains": [], "losses": [], "neither": []}
    for row in ours:
        ratio = row["ratios"].get(reference, {}).get(THROUGHPUT)
        if ratio is None:
            continue
        kind = "neither"
        if ratio["min"] > 1:
            kind = "gains"
        elif ratio["max"] < 1:
            kind = "losses"
        groups[kind].append(f"{row['study']} {_range(ratio)}")
    sentences = [
        f"{label}: {'; '.join(groups[kind])}."
        for kind, label in (
            ("gains", f"More tokens per second than {reference} in every repeat"),
            ("losses", f"Fewer than {reference} in every repeat"),
            ("neither", f"No clear difference to {reference}"),
        )
        if groups[kind]
    ]
    return " ".join(sentences)


def _p1_never(rows: Sequence[Row]) -> str:
    """Page size 1 with private prompts, against the best of the arms that repack."""
    parts = []
    for row in rows:
        if row["arm"] != "p1-never":
            continue
        others = [r for r in rows if r["study"] == row["study"] and r["arm"] in REPACKING]
        if others:
            best = max(others, key=lambda r: _median(r, THROUGHPUT))
            share = _median(row, THROUGHPUT) / max(_median(best, THROUGHPUT), 1e-9)
            parts.append(f"{row['study']} {number(share)} of {best['arm']}'s")
    text = "Page size 1 with private prompts, tokens per second (medians)"
    return f"{text}: {'; '.join(parts)}." if parts else ""


def _memory(ours: Sequence[Row]) -> str:
    parts = []
    for row in ours:
        found = [
            f"{_range(row['ratios'][reference][HELD])} of {reference}'s"
            for reference in ("naive", "skip")
            if HELD in row["ratios"].get(reference, {})
        ]
        if found:
            held = number(_median(row, HELD))
            parts.append(f"{row['study']}: {held} tokens, {', '.join(found)}")
    return f"{'; '.join(parts)}." if parts else ""


def _cost(ours: Sequence[Row]) -> str:
    parts = []
    for row in ours:
        copied = _median(row, "copied_bytes") / 1e6
        text = f"{row['study']}: {number(copied)} MB copied, {_median(row, 'forks'):.0f} forks"
        if _median(row, "forks"):
            predicted = number(_median(row, "fork_predicted_pages"))
            realised = number(_median(row, "fork_realised_pages"))
            text += f" (pages saved: {predicted} predicted, {realised} realised)"
        cpu = row["ratios"].get("skip", {}).get(CPU)
        if cpu is not None:
            text += f", server CPU per token {_range(cpu)} of skip's"
        parts.append(text)
    return f"{'; '.join(parts)}." if parts else ""


def _median(row: Row, name: str) -> float:
    return float(row["figures"].get(name, {}).get("median", 0.0))


def _range(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} [{ratio['min']:.2f}, {ratio['max']:.2f}]"
