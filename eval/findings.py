"""What the full table says about copy-on-write, put into words from its rows alone.

A study counts as a gain or a loss only where every repeat of at least three says so and the median
is further from 1 than two servers that do the same differ; all others are "no clear difference" or
"too few repeats". Every study is named, also those in which an
arm loses and those in which two arms could not be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .table import difference, number, other_evictions, ranged

Row = Mapping[str, Any]
THROUGHPUT, HELD, CPU = "output_tokens_per_s", "used_tokens_per_request", "server_cpu_ms_per_token"
REPACKING = ("skip", "mask", "cow", "auto", "publish-never")
QUALITY = (("recall", "recall"), ("agreement", "agreement with native"))
KINDS = (
    ("more", "{arm}: more tokens per second than {reference} in every repeat"),
    ("fewer", "{arm}: fewer than {reference} in every repeat"),
    ("neither", "{arm}: no clear difference to {reference}"),
    ("once", "{arm}: fewer than three repeats, so no answer yet, of {reference}'s"),
)
MIN_REPEATS = 3
NOISE = 0.04  # hook-only against native, the same tokens and all but the same work: 0.96 to 1.02


def findings(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Questions and their answers, as far as the table has the arms for them."""
    answers = [
        ("What is this table short of?", _short_of(rows)),
        (
            "When does copy-on-write beat skip, and by how much?",
            [*_against(rows, "auto", "skip", True), *_against(rows, "cow", "skip")],
        ),
        ("What memory does a running request hold (auto)?", _memory(rows)),
        ("What does copy-on-write (auto) cost?", _cost(rows)),
        (
            "When is plain page size 1 the better choice?",
            [
                *_against(rows, "p1", "auto", True),
                *_against(rows, "p1-never", "auto", True),
                *_best_that_repacks(rows),
                *_held(rows, ("p1", "p1-never"), "auto"),
            ],
        ),
        (
            "What does reclaiming bring at all, against eviction alone?",
            _against(rows, "auto", "naive"),
        ),
        (
            "Is it worth keeping prompts of pruned requests private?",
            _against(rows, "publish-never", "auto"),
        ),
        ("What if the scheduler waits for every copy?", _against(rows, "reclaim-sync", "auto")),
        ("Do arms that should evict the same tokens answer alike?", _alike(rows)),
    ]
    return [(question, answer) for question, answer in answers if answer]


def _of(rows: Sequence[Row], arm: str) -> list[Row]:
    return [row for row in rows if row["arm"] == arm]


def _short_of(rows: Sequence[Row]) -> list[str]:
    """Repeats that are missing and requests that failed."""
    cut: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["repeats"] < row["repeats_planned"]:
            done = f"{row['repeats']} of {row['repeats_planned']}"
            cut.setdefault((row["study"], done), []).append(row["arm"])
    parts = [f"{study} {done} ({', '.join(arms)})" for (study, done), arms in cut.items()]
    failed = [f"{row['study']} {row['arm']} {row['failed']}" for row in rows if row["failed"]]
    lines = [f"Fewer repeats than planned: {'; '.join(parts)}."] if parts else []
    if failed:
        lines.append(f"Requests failed, so not all did the same work: {'; '.join(failed)}.")
    return lines


def _against(
    rows: Sequence[Row], arm: str, reference: str, name_missing: bool = False
) -> list[str]:
    """Throughput of an arm over a reference, study by study: gains, losses, and neither."""
    groups: dict[str, list[str]] = {kind: [] for kind, _ in KINDS}
    compared = set()
    for row in _of(rows, arm):
        ratio = row["ratios"].get(reference, {}).get(THROUGHPUT)
        if ratio is None:
            continue
        compared.add(row["study"])
        kind = "neither"
        if ratio["repeats"] < MIN_REPEATS:
            kind = "once"
        elif ratio["min"] > 1 and ratio["median"] >= 1 + NOISE:
            kind = "more"
        elif ratio["max"] < 1 and ratio["median"] <= 1 - NOISE:
            kind = "fewer"
        groups[kind].append(f"{row['study']} {ranged(ratio)}")
    if not compared:
        return []
    lines = [
        f"{label.format(arm=arm, reference=reference)}: {'; '.join(groups[kind])}."
        for kind, label in KINDS
        if groups[kind]
    ]
    studies = dict.fromkeys(row["study"] for row in rows)
    missing = [study for study in studies if study not in compared]
    if missing and name_missing:
        lines.append(f"{arm}: not measured beside {reference}: {'; '.join(missing)}.")
    return lines


def _best_that_repacks(rows: Sequence[Row]) -> list[str]:
    """Page size 1 with private prompts, against the arm that repacks with the best median."""
    parts = []
    for row in _of(rows, "p1-never"):
        others = [
            other
            for other in rows
            if other["study"] == row["study"]
            and other["arm"] in REPACKING
            and THROUGHPUT in row["ratios"].get(other["arm"], {})
        ]
        if others:
            best = max(others, key=lambda other: _median(other, THROUGHPUT) or 0.0)["arm"]
            parts.append(f"{row['study']} {ranged(row['ratios'][best][THROUGHPUT])} of {best}'s")
    text = "p1-never: tokens per second against the best that repacks, by its median"
    return [f"{text}: {'; '.join(parts)}."] if parts else []


def _held(rows: Sequence[Row], arms: Sequence[str], reference: str) -> list[str]:
    lines = []
    for arm in arms:
        parts = [
            f"{row['study']} {ranged(row['ratios'][reference][HELD])}"
            for row in _of(rows, arm)
            if HELD in row["ratios"].get(reference, {})
        ]
        if parts:
            lines.append(f"{arm}: pool tokens held, of {reference}'s: {'; '.join(parts)}.")
    return lines


def _memory(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in _of(rows, "auto"):
        found = [
            f"{ranged(row['ratios'][reference][HELD])} of {reference}'s"
            for reference in ("naive", "skip")
            if HELD in row["ratios"].get(reference, {})
        ]
        held = _median(row, HELD)
        if found and held is not None:
            lines.append(f"{row['study']}: {number(held)} tokens, {', '.join(found)}.")
    return lines


def _cost(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in _of(rows, "auto"):
        parts = []
        copied, forks = _median(row, "copied_bytes"), _median(row, "forks")
        if copied is not None:
            parts.append(f"{number(copied / 1e6)} MB copied")
        if forks is not None:
            text = f"{forks:g} forks"
            each = [_median(row, f"{kind}_pages_per_fork") for kind in ("predicted", "realised")]
            if None not in each:
                predicted, realised = (number(value or 0.0) for value in each)
                text += f" (pages saved by each: {predicted} predicted, {realised} realised)"
            parts.append(text)
        cpu = row["ratios"].get("skip", {}).get(CPU)
        if cpu is not None:
            parts.append(f"server CPU per token {ranged(cpu)} of skip's")
        parts += _quality(rows, row)
        if parts:
            lines.append(f"{row['study']}: {', '.join(parts)}.")
    return lines


def _alike(rows: Sequence[Row]) -> list[str]:
    """Answers against those of the arm with the same evictions; one line for all that are equal."""
    equal: dict[tuple[str, str], list[str]] = {}
    lines = []
    for row in rows:
        found = row.get("same_evictions")
        if not found or not found["requests"]:
            continue
        if not found["different"]:
            label = f"{row['study']} {found['requests']}"
            other = other_evictions(found)
            if other is not None:
                label += f" (though {other[0]} tokens were evicted, not {other[1]})"
            equal.setdefault((row["arm"], found["reference"]), []).append(label)
            continue
        lines.append(f"{row['study']}: {row['arm']}: {difference(found, found['reference'])}")
    same = [
        f"{arm}: all answers equal {reference}'s: {'; '.join(studies)}."
        for (arm, reference), studies in equal.items()
    ]
    return same + lines


def _quality(rows: Sequence[Row], row: Row) -> list[str]:
    """Quality of a row beside that of skip, which evicts less, and of full attention."""
    parts = []
    for name, label in QUALITY:
        mine = _median(row, name)
        if mine is None:
            continue
        others = []
        for arm in ("skip", "native") if name == "recall" else ("skip",):
            for other in _of(rows, arm):
                theirs = _median(other, name) if other["study"] == row["study"] else None
                if theirs is not None:
                    others.append(f"{arm} {number(100 * theirs)} %")
        beside = f" ({', '.join(others)})" if others else ""
        parts.append(f"{label} {number(100 * mine)} %{beside}")
    return parts


def _median(row: Row, name: str) -> float | None:
    figure = row["figures"].get(name)
    return None if figure is None else float(figure["median"])
