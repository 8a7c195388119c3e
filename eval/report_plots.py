"""Which plots a report shows: of one result, and of a whole table. Name, caption, figure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from . import overview_plots, plots
from .compare import FIGURES, arm_names, runs_of
from .rows import rows_of, study_name

FEW_ARMS = 3  # up to so many, every arm has plots of its own
MAIN_ARMS = ("skip", "auto", "p1", "p1-never")
QUALITY = (("recall", "expected facts found"), ("agreement", "agreement with the unpruned arm"))


class Plot(NamedTuple):
    """A plot of the report; `name` is its file name without ending."""

    name: str
    caption: str
    figure: Figure


def table_plots(rows: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Plots of a table of several studies: what the main arms serve and hold, of eviction alone."""
    if len({row["study"] for row in rows}) < 2:
        return []
    shown = []
    for name, path, caption in (
        ("studies-throughput", "output_tokens_per_s", "Output tokens per second"),
        ("studies-held", "used_tokens_per_request", "Pool tokens held per running request"),
    ):
        if any(path in row["ratios"].get("naive", {}) for row in rows if row["arm"] in MAIN_ARMS):
            figure = overview_plots.study_dots(rows, MAIN_ARMS, "naive", path)
            text = f"{caption}, of naive's in the same repeat: median in a line from least to most."
            shown.append(Plot(name, text, figure))
    return shown


def result_plots(result: Mapping[str, Any]) -> list[Plot]:
    """The plots of one result, in reading order."""
    runs, study = result["runs"], study_name(result)
    rows = rows_of([result])
    shown: list[Plot] = []
    if len(result["summary"]) <= FEW_ARMS:
        shown += _ratio_plots(result)
    if any("used_tokens_per_request" in row["figures"] for row in rows if row["arm"] != "native"):
        shown += _memory_plots(rows, study)
    shown.append(
        Plot(
            f"{study}-repeats",
            "Output tokens per second in every repeat.",
            plots.per_repeat(runs, lambda run: run["summary"]["output_tokens_per_s"], "tokens / s"),
        )
    )
    shared, all_of_them = shared_repeats(runs)
    which = "All repeats." if all_of_them else "Repeats that every arm has."
    for name, caption, values_of, label in (
        ("ttft", "Time to first token.", lambda r: [r["ttft_s"]], "time to first token, ms"),
        ("itl", "Time between tokens.", lambda r: r["gaps_s"], "inter-token latency, ms"),
        ("e2e", "Whole request.", lambda r: [r["latency_s"]], "request latency, ms"),
    ):
        figure = plots.latency_cdf(shared, values_of, label)
        shown.append(Plot(f"{study}-{name}", f"{caption} {which}", figure))
    return [*shown, *_pool_plots(result, study)]


def shared_repeats(runs: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], bool]:
    """The runs of repeats that every arm has, and whether that is all of them; all where there is
    no such repeat. A slower repeat must not be in the samples of some arms only."""
    common = set.intersection(*(set(runs_of(runs, arm)) for arm in arm_names(runs)))
    kept = [run for run in runs if run["repeat"] in common] or list(runs)
    return kept, len(kept) == len(runs)


def _ratio_plots(result: Mapping[str, Any]) -> list[Plot]:
    labels = {path: label for path, (label, _, _) in FIGURES.items()}
    shown = []
    for entry in result["comparisons"]:
        arm, reference = entry["arm"], entry["reference"]
        caption = f"{arm} / {reference}, paired in each repeat. Dots are repeats, bars medians."
        figure = plots.ratio_plot(result["runs"], arm, reference, labels)
        shown.append(Plot(f"{study_name(result)}-{arm}-{reference}", caption, figure))
    return shown


def _memory_plots(rows: Sequence[Mapping[str, Any]], study: str) -> list[Plot]:
    if not any(row["figures"].get("evicted_tokens", {}).get("median") for row in rows):
        return []  # nothing was evicted: there is no memory to give back
    shown = [
        Plot(
            f"{study}-held",
            "Pool tokens held per running request; a cached page that several lock counts once. "
            "Lines: least to most of the repeats.",
            overview_plots.arm_bars(rows, "used_tokens_per_request", "tokens"),
        ),
        Plot(
            f"{study}-throughput",
            "Output tokens per second.",
            overview_plots.arm_bars(rows, "output_tokens_per_s", "tokens / s"),
        ),
    ]
    for quality, label in QUALITY:
        if any(quality in row["figures"] for row in rows):
            figure = overview_plots.quality_against_memory(rows, quality, label)
            caption = f"Quality ({label}) against memory. Left and up is better."
            shown.append(Plot(f"{study}-{quality}", caption, figure))
    return shown


def _pool_plots(result: Mapping[str, Any], study: str) -> list[Plot]:
    runs, capacity = result["runs"], result["config"]["pool"]
    if len(result["summary"]) > FEW_ARMS:
        if not any(run["pool"] for run in runs):
            return []
        caption = "KV pool over time, one map per arm, its first repeat. Line: pool size."
        return [Plot(f"{study}-pool", caption, overview_plots.pool_maps(runs, capacity))]
    shown = []
    for arm in result["summary"]:
        run = next(run for run in runs if run["arm"] == arm)
        if run["pool"]:
            caption = f"KV pool over time: {arm}, repeat {run['repeat'] + 1}. Line: pool size."
            shown.append(Plot(f"{study}-pool-{arm}", caption, plots.pool_plot(run, capacity)))
    return shown


CAPACITY_PLOTS = (
    (
        "capacity-frontier",
        "Capacity frontier: most requests at once on one pool with none taken back.",
        re.compile(r"^(?P<arm>[a-z]+)_frontier_(?!retracting_|ratio_)(?P<case>.+)$"),
        "requests at once",
    ),
    (
        "capacity-latency-frontier",
        "Most requests at once with latency per token within 1.05 of a single request's.",
        re.compile(r"^(?P<arm>[a-z]+)_latency_frontier_(?P<case>.+)$"),
        "requests at once",
    ),
    (
        "capacity-ratios",
        "Against native, in the same repeat: most requests at once, none taken back.",
        re.compile(r"^(?:(?P<arm>[a-z]+)_)?frontier_ratio_(?P<case>.+)$"),
        "ratio",
    ),
    (
        "capacity-sla",
        "auto against native: throughput with p95 latency per token within 1.05 of native's.",
        re.compile(r"^sla_throughput_ratio_(?P<case>.+)$"),
        "ratio",
    ),
)


def figures_plots(document: Mapping[str, Any]) -> list[Plot]:
    """Plots of a figures file: the frontiers of topic `capacity`; none of other topics."""
    if document["topic"] != "capacity":
        return []
    shown = []
    for name, caption, pattern, label in CAPACITY_PLOTS:
        found = [(pattern.match(key), entry) for key, entry in document["figures"].items()]
        bars = [
            (match["case"].replace("_", " "), match.groupdict().get("arm") or "auto", entry)
            for match, entry in found
            if match
        ]
        if bars:
            shown.append(Plot(name, caption, overview_plots.case_bars(bars, label)))
    return shown
