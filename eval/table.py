"""The result as a few lines of text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .arms import ARMS
from .compare import FIGURES

COLUMNS = (
    ("output_tokens_per_s", "tok/s", 1.0),
    ("ttft.p50", "TTFT p50 ms", 1000.0),
    ("ttft.p95", "TTFT p95 ms", 1000.0),
    ("itl.p50", "ITL p50 ms", 1000.0),
    ("e2e.p95", "e2e p95 s", 1.0),
    ("cached_share", "cached %", 100.0),
    ("server_cpu_ms_per_token", "CPU ms/tok", 1.0),
    ("used_tokens_per_request", "held tok/req", 1.0),
    ("mean_running", "running", 1.0),
    ("freed_pages", "pages freed", 1.0),
    ("recall", "recall %", 100.0),
    ("agreement", "agree %", 100.0),
)
RATIO_COLUMNS = (
    "request_throughput", "ttft.p95", "e2e.p95", "server_cpu_ms_per_token",
    "used_tokens_per_request",
)  # fmt: skip


def number(value: float) -> str:
    """Three significant digits, never in exponent form."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - len(str(int(abs(value)))) + (1 if abs(value) >= 1 else 2))
    return f"{value:.{min(digits, 4)}f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first one left-aligned and the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def result_table(result: Mapping[str, Any]) -> str:
    """Medians per arm, paired ratios with their range, and token identity."""
    repeats = result["config"]["repeats"]
    arms = result["summary"].values()
    columns = [column for column in COLUMNS if any(column[0] in figures for figures in arms)]
    rows = [["arm", *(label for _, label, _ in columns)]]
    for arm, figures in result["summary"].items():
        rows.append([arm, *(_median(figures.get(path), by) for path, _, by in columns)])
    parts = ["one repeat" if repeats == 1 else f"median of {repeats} repeats", aligned(rows)]
    if result["comparisons"]:
        rows = [["ratio, median [min, max]", *(FIGURES[path][0] for path in RATIO_COLUMNS)]]
        for entry in result["comparisons"]:
            cells = [_ratio(entry["ratios"].get(path)) for path in RATIO_COLUMNS]
            rows.append([f"{entry['arm']} / {entry['reference']}", *cells])
        parts += ["", aligned(rows)]
    warnings = [f"WARNING: {line}" for line in warning_lines(result)]
    return "\n".join([*parts, "", *token_lines(result), *memory_lines(result), *warnings])


def memory_lines(result: Mapping[str, Any]) -> list[str]:
    """One sentence per arm that gives memory back on how much, against the arm that does not."""
    lines = []
    for entry in result["comparisons"]:
        figures = result["summary"][entry["arm"]]
        held = entry["ratios"].get("used_tokens_per_request")
        freed = figures.get("freed_pages", {"median": 0})["median"]
        if entry["reference"] == "naive" and freed and held:
            tokens = figures["used_tokens_per_request"]["median"]
            size = ARMS[entry["arm"]].page_size or result["config"]["page_size"]
            change = 100 * (held["median"] - 1)
            lines.append(
                f"memory: {entry['arm']} gave {freed:.0f} pages of {size} back while requests ran; "
                f"a running request holds {tokens:.0f} tokens of the pool, {abs(change):.0f} % "
                f"{'less' if change < 0 else 'more'} than with naive."
            )
    return lines


def _median(figure: Mapping[str, float] | None, factor: float) -> str:
    return "-" if figure is None else number(figure["median"] * factor)


def _ratio(ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return "-"
    return ranged(ratio, 3)


def ranged(ratio: Mapping[str, float], digits: int = 2) -> str:
    """A ratio over repeats: median [least, most]."""
    median, least, most = (f"{ratio[key]:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} [{least}, {most}]"


def warning_lines(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures; empty if there is nothing."""
    runs, planned = result["runs"], result["runs_planned"]
    lines = []
    failed = sum(run["summary"]["failed"] for run in runs)
    if failed:
        lines.append(f"{failed} requests failed: the arms did not do the same work.")
    if len(runs) < planned:
        lines.append(f"Interrupted: {len(runs)} of {planned} runs were finished.")
    origins = [run["origin"] for run in runs if "origin" in run]  # cells of a grid
    for name in ("machine", "versions", "patch_series"):
        kinds = {json.dumps(origin.get(name), sort_keys=True) for origin in origins}
        if len(kinds) > 1:
            lines.append(f"Cells differ in their {name.replace('_', ' ')}: see their files.")
    load, cores = busiest_load(runs), result["machine"]["cores"]
    if load > cores:
        lines.append(
            f"Other work kept the machine busy (load average {load:.1f} on {cores} cores before a "
            "server started): times and ratios are not to be relied on."
        )
    return lines


def busiest_load(runs: Sequence[Mapping[str, Any]]) -> float:
    """Largest one-minute load average seen just before a server was started.

    One server at a time with one client stays below two, so more than the number of cores means
    that something else was running.
    """
    return max(float(run["load_average_before"]) for run in runs)


def token_lines(result: Mapping[str, Any]) -> list[str]:
    """One sentence per arm on whether it generated the reference's tokens."""
    lines = []
    for entry in result["tokens"]["arms"]:
        arm, total = entry["arm"], entry["requests"]
        reference = entry.get("reference", result["tokens"]["reference"])
        repeats = "" if entry["self_consistent"] else " Its own repeats differ from each other."
        if arm == reference:
            if repeats:
                lines.append(f"tokens: {arm} (the reference):{repeats}")
            continue
        if not entry["different"]:
            text = f"all {total} answers equal {reference}'s."
        else:
            text = difference(entry, reference)
        lines.append(f"tokens: {arm}: {text}{repeats}")
    return lines


def other_evictions(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    """Tokens evicted by an arm and by its reference (an entry of `check_tokens`), if both are known
    and they differ."""
    evictions = entry.get("evictions", {})
    evicted, theirs = evictions.get("evicted"), evictions.get("reference_evicted")
    return None if evicted is None or theirs is None or evicted == theirs else (evicted, theirs)


def difference(entry: Mapping[str, Any], reference: str) -> str:
    """How many answers differ (an entry of `check_tokens`), and whether the same tokens can have
    been evicted."""
    text = (
        f"{entry['mismatched']} of {entry['requests']} answers differ from {reference}'s to the "
        f"same prompt, {entry['different']} in all."
    )
    other = other_evictions(entry)
    if other is not None:
        text += f" Other tokens were evicted: {other[0]}, {reference} {other[1]}."
    early = entry.get("evictions", {}).get("early_evictions")
    if early:
        text += f" {early} looks came ahead of the interval, the pool being short."
    return text
