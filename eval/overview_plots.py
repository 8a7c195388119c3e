"""Plots over several arms or studies: bars, quality against memory, pool maps, frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .arms import ARMS
from .compare import arm_names, runs_of
from .plots import EVICTABLE, SIZE, USED, add_legend, colours, new_figure, styled

Row = Mapping[str, Any]
Run = Mapping[str, Any]
MAP_COLUMNS = 2


@styled
def arm_bars(rows: Sequence[Row], figure_name: str, label: str, factor: float = 1.0) -> Figure:
    """One bar per arm: the median of a figure, with a line from least to most."""
    shown = [row for row in rows if figure_name in row["figures"]][::-1]
    figure, axes = new_figure((SIZE[0], 0.9 + 0.26 * max(2, len(shown))))
    colour = colours([row["arm"] for row in shown])
    for at, row in enumerate(shown):
        values = row["figures"][figure_name]
        axes.barh(at, values["median"] * factor, color=colour[row["arm"]], height=0.68)
        axes.plot(
            [values["min"] * factor, values["max"] * factor], [at, at],
            color="#1b232c", linewidth=1.4, solid_capstyle="butt",
        )  # fmt: skip
    axes.set_yticks(range(len(shown)), [row["arm"] for row in shown])
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    return figure


@styled
def study_dots(rows: Sequence[Row], arms: Sequence[str], reference: str, name: str) -> Figure:
    """A line per study: the ratio of each arm to the reference, a dot at its median in a line from
    least to most of the repeats."""
    studies = list(dict.fromkeys(str(row["study"]) for row in rows))[::-1]
    shown = [row for row in rows if row["arm"] in arms and name in row["ratios"].get(reference, {})]
    figure, axes = new_figure((SIZE[0], 0.9 + 0.1 * (len(arms) + 2) * max(2, len(studies))))
    colour = colours(arms)
    for row in shown:
        ratio, arm = row["ratios"][reference][name], row["arm"]
        at = studies.index(row["study"]) + 0.7 * (0.5 - (arms.index(arm) + 0.5) / len(arms))
        axes.plot([ratio["min"], ratio["max"]], [at, at], color=colour[arm], linewidth=1.6)
        axes.plot([ratio["median"]], [at], "o", color=colour[arm], markersize=4.5)
    for arm in dict.fromkeys(row["arm"] for row in shown):
        axes.plot([], [], "o-", color=colour[arm], label=arm, markersize=4.5, linewidth=1.6)
    axes.axvline(1.0, color="#4b5563", linewidth=1)
    axes.set_yticks(range(len(studies)), studies, fontsize=8)
    axes.set_ylim(-0.6, len(studies) - 0.4)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{reference} = 1")
    axes.grid(axis="y", visible=False)
    figure.legend(
        *axes.get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8
    )
    return figure


@styled
def quality_against_memory(rows: Sequence[Row], quality: str, label: str) -> Figure:
    """A dot per arm: tokens of the pool that a running request holds, and quality."""
    shown = [
        row for row in rows
        if quality in row["figures"] and "used_tokens_per_request" in row["figures"]
    ]  # fmt: skip
    figure, axes = new_figure()
    colour = colours([row["arm"] for row in shown])
    for row in shown:
        held = row["figures"]["used_tokens_per_request"]["median"]
        axes.plot(
            [held], [100 * row["figures"][quality]["median"]], "o",
            color=colour[row["arm"]], markersize=8, alpha=0.85, label=row["arm"],
        )  # fmt: skip
    axes.set_xlabel("pool tokens held per running request")
    axes.set_ylabel(f"{label}, %")
    axes.set_ylim(-4, 104)
    axes.set_xlim(left=0)
    add_legend(figure, axes)
    return figure


@styled
def pool_maps(runs: Sequence[Run], capacity: float) -> Figure:
    """The pool over time, one small map per arm (its first repeat): held, only cached, free."""
    arms = [arm for arm in arm_names(runs) if _first_run(runs, arm)["pool"]]
    lines = -(-len(arms) // MAP_COLUMNS)
    figure = Figure(figsize=(SIZE[0], 0.5 + 1.35 * lines), layout="constrained")
    grid = figure.subplots(lines, MAP_COLUMNS, sharex=True, sharey=True, squeeze=False)
    longest = 1.0
    for at, arm in enumerate(arms):
        axes = grid[at // MAP_COLUMNS][at % MAP_COLUMNS]
        samples = _first_run(runs, arm)["pool"]
        times = [sample["at_s"] for sample in samples]
        axes.stackplot(
            times,
            [sample["used"] for sample in samples],
            [sample["evictable"] for sample in samples],
            step="post", colors=(USED, EVICTABLE), labels=("held", "cached"),
        )  # fmt: skip
        axes.axhline(capacity, color="#4b5563", linewidth=0.8)
        axes.set_title(arm, fontsize=9, pad=3)
        axes.grid(False)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_locator(MaxNLocator(3))
        longest = max(longest, *times)
    for spare in grid.flat[len(arms) :]:
        spare.set_axis_off()
    grid[0][0].set_xlim(0, longest)
    grid[0][0].set_ylim(0, capacity * 1.08)
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=8
    )
    figure.supxlabel("seconds", fontsize=9)
    figure.supylabel("tokens of the pool", fontsize=9)
    return figure


def _first_run(runs: Sequence[Run], arm: str) -> Run:
    mine = runs_of(runs, arm)
    return mine[min(mine)]


@styled
def case_bars(bars: Sequence[tuple[str, str, Mapping[str, Any]]], label: str) -> Figure:
    """Bars of (case, arm, figure of a figures file), a group per case, with spread where known."""
    cases = sorted({case for case, _, _ in bars})
    known = [arm for arm in ARMS if any(arm == other for _, other, _ in bars)]
    colour = colours(known)
    ordered = sorted(bars, key=lambda bar: (cases.index(bar[0]), known.index(bar[1])))
    figure, axes = new_figure((SIZE[0], 0.9 + 0.24 * max(2, len(bars)) + 0.16 * len(cases)))
    places = []
    for number, (case, arm, entry) in enumerate(ordered):
        at = -number - 0.6 * cases.index(case)
        places.append(at)
        axes.barh(at, entry["value"], color=colour[arm], height=0.8)
        spread = entry.get("spread") or {}
        if "min" in spread and "max" in spread:
            axes.plot([spread["min"], spread["max"]], [at, at], color="#1b232c", linewidth=1.4)
    if label == "ratio":
        axes.axvline(1.0, color="#4b5563", linewidth=1)
    axes.set_yticks(places, [f"{case}: {arm}" for case, arm, _ in ordered], fontsize=8)
    axes.set_xlabel(label)
    axes.set_xlim(left=0)
    axes.grid(axis="y", visible=False)
    return figure
