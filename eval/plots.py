"""Plots of a result, sized to stay readable in a phone-wide column; as inline SVG or PNG."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .compare import RATIO_FIGURES, arm_names, paired_ratios, runs_of

SIZE = (4.9, 3.0)  # inches; about 350 CSS pixels wide at a scale of 1
PNG_DPI = 160
MAX_INSIDE, LEGEND_COLUMNS = 4, 4
MAX_STEPS = 200  # of a distribution: finer than a line that is 350 pixels wide can show
# Told apart by people with any colour vision; known arms keep their colour in every report.
COLOURS = {
    "stock": "#6b7280", "native": "#0072b2", "hook-only": "#d55e00", "naive": "#8a6d00",
    "p1": "#7a3db8", "p1-never": "#b58ee0", "skip": "#cc79a7", "mask": "#56b4e9",
    "cow": "#b22222", "auto": "#009e73", "publish-never": "#1b232c", "reclaim-async": "#66c2a5",
    "reclaim-sync": "#a3b18a",
}  # fmt: skip
SPARE_COLOURS = ("#e69f00", "#4c6ef5", "#7f5539", "#2f9e44", "#c2255c", "#495057")
USED, EVICTABLE, FREE = "#0072b2", "#9ecae8", "#eef1f4"
STYLE: Any = {  # matplotlib's own key type is a long literal
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # SVG names all that are listed, in every text
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e6ea",
    "grid.linewidth": 0.7,
    "axes.edgecolor": "#9aa3ad",
    "axes.axisbelow": True,
    "legend.frameon": False,
}

MORE_DIGITS = re.compile(r"(\.\d)\d+")
MOVE = re.compile(r"([MLz]) ?(-?[\d.]*) ?(-?[\d.]*)")

Run = Mapping[str, Any]
Parameters = ParamSpec("Parameters")


def colours(arms: Sequence[str]) -> dict[str, str]:
    """A colour per arm."""
    spare = iter(SPARE_COLOURS * len(arms))
    return {arm: COLOURS.get(arm) or next(spare) for arm in arms}


def styled(plot: Callable[Parameters, Figure]) -> Callable[Parameters, Figure]:
    """Draw in this module's style."""

    @functools.wraps(plot)
    def draw(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Figure:
        with matplotlib.rc_context(STYLE):
            return plot(*args, **kwargs)

    return draw


def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element that fills the width of its container."""
    stream = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' d="([^"]*)"', lambda path: f' d="{_shortened(path[1])}"', text)
    text = re.sub(r' (x|y|transform)="[^"]*"', lambda place: MORE_DIGITS.sub(r"\1", place[0]), text)
    named = set(re.findall(r"#([\w.-]+)", text))
    text = re.sub(r' id="([^"]*)"', lambda name: name[0] if name[1] in named else "", text)
    text = re.sub(r">\s+<", "><", text)
    # The viewBox stays; the fixed size in points goes, so that CSS decides.
    return re.sub(r' (?:width|height)="[^"]*pt"', "", text, count=2)


def _shortened(path: str) -> str:
    """A path in tenths of a point, each place once and steps as such: no eye sees the rest, and
    of a page with many samples it is the larger part."""
    if set(path) & set("CQAScqas"):
        return MORE_DIGITS.sub(r"\1", path)
    found, last = [], ("", "")
    for command, *place in MOVE.findall(path):
        x, y = (MORE_DIGITS.sub(r"\1", number) for number in place)
        if command != "L":
            found.append(f"{command}{x} {y}".strip())
        elif (x, y) != last:
            found.append(f"V{y}" if x == last[0] else f"H{x}" if y == last[1] else f"L{x} {y}")
        last = (x, y)
    return "".join(found)


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    stream = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(stream, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return stream.getvalue()


def add_legend(figure: Figure, axes: Axes) -> None:
    """A legend inside the axes, or below them where it would hide too much."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    if len(labels) <= MAX_INSIDE:
        axes.legend(loc="lower right")
        return
    lines = -(-len(labels) // LEGEND_COLUMNS)
    figure.set_figheight(figure.get_figheight() + 0.19 * lines)
    figure.legend(
        handles, labels, loc="outside lower center", ncols=LEGEND_COLUMNS, fontsize=8,
        columnspacing=1.0, handlelength=1.2,
    )  # fmt: skip


def new_figure(size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot()


@styled
def latency_cdf(runs: Sequence[Run], values_of: Any, label: str) -> Figure:
    """Cumulative distribution over all repeats, one line per arm; of many samples, at most
    `MAX_STEPS` evenly spaced quantiles, the least and the most among them.

    Args:
        values_of: request (as a dict) -> its samples in seconds.
    """
    figure, axes = new_figure()
    arms = arm_names(runs)
    for arm, colour in colours(arms).items():
        samples = numpy.sort(
            [
                1000 * value
                for run in runs_of(runs, arm).values()
                for request in run["requests"]
                if not request["error"]
                for value in values_of(request)
            ]
        )
        if len(samples):
            kept = numpy.linspace(0, len(samples) - 1, min(len(samples), MAX_STEPS)).round()
            share = (kept + 1) / len(samples)
            axes.step(
                samples[kept.astype(int)],
                share,
                where="post",
                label=arm,
                color=colour,
                linewidth=1.6,
            )
    axes.set_xlabel(label)
    axes.set_ylabel("share of samples")
    axes.set_ylim(0, 1.01)
    axes.set_xlim(left=0)
    add_legend(figure, axes)
    return figure


@styled
def per_repeat(runs: Sequence[Run], values_of: Any, label: str) -> Figure:
    """One dot per repeat and arm, joined, so that drift of the machine shows."""
    figure, axes = new_figure()
    for arm, colour in colours(arm_names(runs)).items():
        points = sorted(runs_of(runs, arm).items())
        axes.plot(
            [repeat + 1 for repeat, _ in points],
            [values_of(run) for _, run in points],
            marker="o", markersize=5, linewidth=1.2, color=colour, label=arm,
        )  # fmt: skip
    axes.set_xlabel("repeat")
    axes.set_ylabel(label)
    most = max(values_of(run) for run in runs)
    axes.set_ylim(0, most * 1.08 or 1.0)
    last = max(int(run["repeat"]) for run in runs) + 1
    axes.set_xlim(0.6, last + 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    add_legend(figure, axes)
    return figure


@styled
def ratio_plot(runs: Sequence[Run], arm: str, reference: str, labels: Mapping[str, str]) -> Figure:
    """Every paired ratio of an arm to its reference: dots are repeats, the bar their median."""
    rows = [(path, paired_ratios(runs, arm, reference, path)) for path in RATIO_FIGURES]
    rows = [(path, values) for path, values in rows if values][::-1]
    figure, axes = new_figure((SIZE[0], 0.9 + 0.3 * len(rows)))
    colour = colours([arm])[arm]
    for at, (_, values) in enumerate(rows):
        axes.plot(values, [at] * len(values), "o", color=colour, alpha=0.55, markersize=5)
        axes.plot([float(numpy.median(values))], [at], "|", color="black", markersize=13)
    axes.axvline(1.0, color="#4b5563", linewidth=1)
    axes.set_yticks(range(len(rows)), [labels[path] for path, _ in rows])
    axes.set_xlabel(f"{arm} / {reference}")
    axes.set_ylim(-0.6, len(rows) - 0.4)
    return figure


@styled
def pool_plot(run: Run, capacity: float) -> Figure:
    """Pool tokens over time: held by requests, only cached, free; running requests on top."""
    figure, axes = new_figure()
    samples = run["pool"]
    times = [sample["at_s"] for sample in samples]
    used = [sample["used"] for sample in samples]
    cached = [sample["evictable"] for sample in samples]
    axes.stackplot(
        times, used, cached, step="post", colors=(USED, EVICTABLE),
        labels=("held by requests", "cached, evictable"),
    )  # fmt: skip
    axes.axhline(capacity, color="#4b5563", linewidth=1)
    axes.set_ylim(0, capacity * 1.18)
    axes.set_xlim(0, max(times, default=1.0))
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens")
    axes.grid(False)
    axes.legend(loc="upper left", ncols=2, fontsize=8.5, columnspacing=1.0, handlelength=1.2)
    return figure
