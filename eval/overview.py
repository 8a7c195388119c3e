"""The full table in a few columns, as text and for the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .table import aligned, number, ranged

Row = Mapping[str, Any]
# column -> (figure, factor); a figure of the row, as median
COLUMNS = (
    ("tokens/s", "output_tokens_per_s", 1.0),
    ("recall, %", "recall", 100.0),
    ("of answers", "scored_answers", 1.0),
    ("agreement, %", "agreement", 100.0),
    ("held/request, tokens", "used_tokens_per_request", 1.0),
    ("TTFT p95, s", "ttft.p95", 1.0),
    ("TPOT p50, ms", "tpot.p50", 1000.0),
    ("e2e p95, s", "e2e.p95", 1.0),
    ("goodput, req/s", "goodput", 1.0),
    ("queue p95, s", "queue.p95", 1.0),
    ("cached, %", "cached_share", 100.0),
    ("running", "mean_running", 1.0),
    ("F, %", "waste_f", 100.0),
    ("given back, tokens", "freed_tokens", 1.0),
    ("copied, MB", "copied_bytes", 1e-6),
    ("forks", "forks", 1.0),
    ("pages saved per fork", "realised_pages_per_fork", 1.0),
    ("predicted", "predicted_pages_per_fork", 1.0),
    ("retractions", "retractions", 1.0),
)
QUALITY_ENDS = "agreement, %"
SHOWN_RATIOS = (
    ("tokens/s, of native's", "native", "output_tokens_per_s"),
    ("of naive's", "naive", "output_tokens_per_s"),
    ("of skip's", "skip", "output_tokens_per_s"),
    ("held, of naive's", "naive", "used_tokens_per_request"),
)


def overview_table(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`head` and `rows` of cells as text; a row is `study`, `arm`, `cells`. Empty columns go."""
    columns: list[tuple[str, Callable[[Row], str]]] = [("repeats", _repeats)]
    for label, name, factor in COLUMNS:
        if any(name in row["figures"] for row in rows):
            columns.append((label, partial(_median, name=name, factor=factor)))
        if label == QUALITY_ENDS:  # quality stands beside throughput, then what it is of others'
            for title, reference, ratio in SHOWN_RATIOS:
                if any(ratio in row["ratios"].get(reference, {}) for row in rows):
                    columns.append((title, partial(_ratio, reference=reference, name=ratio)))
    if any("sla_tokens_per_s" in row for row in rows):
        columns.append(("tokens/s within the p95 limit", _within_limit))
    return {
        "head": [label for label, _ in columns],
        "rows": [
            {
                "study": row["study"],
                "arm": row["arm"],
                "cells": [cell(row) for _, cell in columns],
            }
            for row in rows
        ],
    }


def main_tables(rows: Sequence[Row]) -> dict[str, list[list[str]]]:
    """The main columns, study by study: the head, then a line per arm."""
    kept = {"tokens/s", "TTFT p95, s", "e2e p95, s", "cached, %", "held/request, tokens"}
    kept |= {"TPOT p50, ms", "goodput, req/s"}
    kept |= {"repeats", "running", "forks", "recall, %", "agreement, %"}
    kept |= {label for label, _, _ in SHOWN_RATIOS}
    found = {}
    for study in dict.fromkeys(str(row["study"]) for row in rows):
        table = overview_table([row for row in rows if row["study"] == study])
        at = [index for index, label in enumerate(table["head"]) if label in kept]
        lines = [["arm", *(table["head"][index] for index in at)]]
        lines += [[row["arm"], *(row["cells"][index] for index in at)] for row in table["rows"]]
        found[study] = lines
    return found


def overview_text(rows: Sequence[Row]) -> str:
    """The table as text: one block per study, the main columns."""
    return "\n\n".join(f"{study}\n{aligned(lines)}" for study, lines in main_tables(rows).items())


def _repeats(row: Row) -> str:
    done, planned = row["repeats"], row["repeats_planned"]
    return str(done) if done == planned else f"{done} of {planned}"


def _within_limit(row: Row) -> str:
    figure = row.get("sla_tokens_per_s")
    return "-" if figure is None else number(figure["median"])


def _median(row: Mapping[str, Any], name: str, factor: float) -> str:
    figure = row["figures"].get(name)
    if figure is None:
        return "-"
    value = figure["median"] * factor
    return f"{value:.0f}" if value == int(value) else number(value)


def _ratio(row: Mapping[str, Any], reference: str, name: str) -> str:
    ratio = row["ratios"].get(reference, {}).get(name)
    return "-" if ratio is None else ranged(ratio)
