"""One plot per metric, drawn from a figures document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from vtoken_sglang_eval.plots import STYLE

from .cells import KEEPS, policy_names
from .peer import PRESSES

# Told apart by people with any colour vision, and by their marks.
MARKS: Final = (
    ("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "v"),
    ("#8a6d00", "D"), ("#56b4e9", "P"), ("#7a3db8", "X"), ("#6b7280", "*"),
)  # fmt: skip
DPI: Final = 110
TITLES: Final = {"after": "policy has seen the question", "before": "policy has not"}


def draw_all(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `policies_METRIC.png` for every metric the document has; returns what was written."""
    figures = document["figures"]
    drawn: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        if f"perplexity_ratio_{_cell(policy_names()[0], KEEPS[0])}" in figures:
            drawn["perplexity"] = _perplexity(figures)
        for kind in ("needle", "recall", "ruler"):
            placements = [key for key in TITLES if f"{kind}_{key}_full" in figures]
            if placements:
                drawn[kind] = _accuracy(figures, kind, placements)
        if "kvpress_gap_full" in figures:
            drawn["kvpress"] = _gaps(figures)
        paths = []
        for name, figure in drawn.items():
            path = folder / f"policies_{name}.png"
            figure.savefig(path, dpi=DPI, metadata={"Software": None})
            paths.append(path)
    return paths


def _cell(policy: str, keep: float) -> str:
    return f"{policy}_keep{round(100 * keep)}"


def _lines(axes: Axes, values: Mapping[str, Sequence[float]]) -> None:
    """One line per policy over the keep ratios, full attention (1) first."""
    at = [1.0, *KEEPS]
    marks = dict(zip(policy_names(), MARKS * 2, strict=False))
    for policy, line in values.items():
        colour, mark = marks[policy]
        axes.plot(at, line, color=colour, marker=mark, markersize=5, linewidth=1.3, label=policy)
    axes.set_xticks(at, [f"{keep:g}" for keep in at])
    axes.invert_xaxis()
    axes.set_xlabel("share of tokens kept")


def _perplexity(figures: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    _lines(
        axes,
        {
            policy: [
                1.0,
                *(figures[f"perplexity_ratio_{_cell(policy, keep)}"]["value"] for keep in KEEPS),
            ]
            for policy in policy_names()
        },
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("perplexity / full attention's")
    axes.legend(fontsize=8, ncols=2)
    return figure


def _accuracy(figures: Mapping[str, Any], kind: str, placements: Sequence[str]) -> Figure:
    figure = Figure(figsize=(0.8 + 4.0 * len(placements), 3.8), layout="constrained")
    panels = figure.subplots(1, len(placements), sharey=True, squeeze=False)[0]
    for axes, placement in zip(panels, placements, strict=True):
        full = figures[f"{kind}_{placement}_full"]["value"]
        names = {
            policy: [f"{kind}_{placement}_{_cell(policy, keep)}" for keep in KEEPS]
            for policy in policy_names()
        }
        _lines(
            axes,
            {
                policy: [full, *(figures[name]["value"] for name in line)]
                for policy, line in names.items()
                if all(name in figures for name in line)
            },
        )
        axes.set_ylim(-0.03, 1.03)
        axes.set_title(TITLES[placement], fontsize=9.5)
    panels[0].set_ylabel(f"{kind}: share right")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _gaps(figures: Mapping[str, Any]) -> Figure:
    names = {"full attention": "full", **{p: _cell(p, KEEPS[1]) for p in PRESSES}}
    rows = [(label, figures.get(f"kvpress_gap_{name}")) for label, name in names.items()]
    shown = [(label, row) for label, row in rows if row is not None][::-1]
    figure = Figure(figsize=(5.4, 0.9 + 0.32 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    for at, (_, row) in enumerate(shown):
        error = 2 * (row["spread"]["standard_error"] or 0.0)
        axes.errorbar(row["value"], at, xerr=error, fmt="o", color="#0072b2", capsize=3)
    axes.axvline(0.0, color="#4b5563", linewidth=1)
    axes.set_yticks(range(len(shown)), [label for label, _ in shown])
    axes.set_xlabel("nats per token, ours - kvpress (bars: two standard errors)")
    return figure
