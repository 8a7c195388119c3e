"""The report's plots, as Vega-Lite by Altair. Every one listens to `arms`, the arms to be shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from .arms import NATIVE
from .table import METRICS
from .verdict import SAME_QUALITY, titled

COLOURS = ("#0b6e99", "#d9730d", "#6940a5", "#0f7b6c", "#ad1a72", "#9f6b53", "#dfab01", "#e03e3e")
NATIVE_COLOUR = "#37352f"
SHAPES = {"-": "diamond", "skip": "square", "mask": "triangle-up", "cow": "cross", "auto": "circle"}
DASHES = {"-": [1, 0], "skip": [6, 3], "mask": [2, 2], "cow": [8, 2, 2, 2], "auto": [1, 0]}
POINTS = 400  # of one line over time


def charts_of(
    runs: pd.DataFrame, cells: pd.DataFrame, traces: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Altair charts of one study by name, in the report's order; what has no data is left out.

    Args:
        runs: `table.runs_table` of the study. cells: `table.wide` of its summary.
        traces: its runs, with their requests and samples.
    """
    cells = cells.assign(label=cells["arm"] + _loads(cells), at=cells.apply(_amount, axis=1))
    have, top = set(cells), cells[cells["load"] == cells["load"].max()]
    found: dict[str, Any] = {}
    if {"quality", "held_per_request"} <= have:
        found["quality_memory"] = _frontier(top, "held_per_request", runs)
    if "quality" in have:
        found["quality_throughput"] = _frontier(top, "tokens_per_s", runs)
    if "e2e_p95" in have:
        found["throughput_latency"] = _load(cells, runs)
    pool = _over_time(traces, "pool", "used")
    if len(pool):
        found["pool"] = _lines(pool, "KV tokens held by running requests", runs)
        running = _over_time(traces, "pool", "running")
        found["running"] = _lines(running, "requests running", runs)
    for metric in ("tokens_per_s", "held_per_request", "ttft_p95", "e2e_p95"):
        if metric in runs and runs[metric].notna().any():
            found[f"runs_{metric}"] = _strip(runs, metric)
    return found


def _loads(cells: pd.DataFrame) -> Any:
    return cells["load"].map(lambda load: f", {load} in flight" if load else "")


def _amount(row: Any) -> str:
    if not pd.isna(row["keep"]):
        return f"{row['keep']:g}"
    return "" if pd.isna(row["budget"]) else f"{row['budget']:.0f}"


def _data(records: list[dict[str, Any]]) -> Any:
    import altair as alt

    make: Any = alt.Data
    return make(values=records)


def _base(frame: pd.DataFrame, runs: pd.DataFrame) -> Any:
    import altair as alt

    arms = alt.param(name="arms", value=list(dict.fromkeys(runs["arm"])))
    frame = frame.assign(group=_group(frame, runs))
    records = frame.astype(object).where(frame.notna(), None).to_dict("records")
    chart = alt.Chart(_data(records), width="container", height=300).add_params(arms)
    return chart.transform_filter("indexof(arms, datum.arm) >= 0")


def _group(frame: pd.DataFrame, runs: pd.DataFrame) -> Any:
    """What a colour stands for: the policy where there are several, else the way with shared pages
    or the ablation; native is always its own."""
    several = len(set(runs["policy"]) - {"none"}) > 1
    plain = frame["policy"] == "none"
    named = (
        frame["policy"]
        if several
        else frame["ablation"].where(frame["ablation"] != "", frame["shared"])
    )
    return named.where(~plain, frame["ablation"].where(frame["ablation"] != "", NATIVE))


def _colour(runs: pd.DataFrame, shown: bool = True) -> Any:
    import altair as alt

    names = list(dict.fromkeys(_group(runs, runs)))
    others = [name for name in names if name != NATIVE]
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(others)}
    scale = alt.Scale(domain=names, range=[colours.get(n, NATIVE_COLOUR) for n in names])
    legend = alt.Legend(title=None, orient="top", columns=4) if shown else None
    return alt.Color("group:N", scale=scale, legend=legend)


def _shape(frame: pd.DataFrame) -> Any:
    import altair as alt

    ways = [way for way in SHAPES if way in set(frame["shared"])]
    scale = alt.Scale(domain=ways, range=[SHAPES[way] for way in ways])
    return alt.Shape("shared:N", scale=scale, legend=None)


def _dash(frame: pd.DataFrame) -> Any:
    import altair as alt

    ways = [way for way in DASHES if way in set(frame["shared"])]
    scale = alt.Scale(domain=ways, range=[DASHES[way] for way in ways])
    return alt.StrokeDash("shared:N", scale=scale, legend=None)


def _tips(frame: pd.DataFrame) -> list[Any]:
    import altair as alt

    names = ("tokens_per_s", "held_per_request", "e2e_p95", "ttft_p95", "quality", "value")
    shown = [name for name in names if name in frame]
    tips = [alt.Tooltip("label:N", title="arm")]
    return tips + [
        alt.Tooltip(f"{name}:Q", title=METRICS[name][0] if name in METRICS else name, format=".3~g")
        for name in shown
    ]


def _frontier(cells: pd.DataFrame, metric: str, runs: pd.DataFrame) -> Any:
    """Quality against a metric at the greatest load: a line per policy and way through its
    amounts, native's point, and the line of what counts as its quality."""
    import altair as alt

    x = alt.X(f"{metric}:Q", title=titled(metric), scale=alt.Scale(zero=False, padding=20))
    y = alt.Y("quality:Q", title="questions answered right", axis=alt.Axis(format="%"),
              scale=alt.Scale(domain=[0, 1]))  # fmt: skip
    base = _base(cells, runs).encode(x=x, y=y, color=_colour(runs))
    lines = base.mark_line(opacity=0.5).encode(
        strokeDash=_dash(cells),
        detail=["policy:N", "shared:N", "ablation:N"],
        order="keep:Q",
    )
    points = base.mark_point(size=90, filled=True, opacity=0.9).encode(
        shape=_shape(cells), tooltip=_tips(cells)
    )
    amounts = base.mark_text(dy=-11, fontSize=10).encode(text="at:N")
    native = cells[cells["native"].astype(bool)]["quality"].max()
    rule = alt.Chart(_data([{"same": SAME_QUALITY * float(native)}])).mark_rule(
        strokeDash=[4, 4], color=NATIVE_COLOUR
    )
    return rule.encode(y="same:Q") + lines + points + amounts


def _load(cells: pd.DataFrame, runs: pd.DataFrame) -> Any:
    """Throughput against p95, a line per arm over the loads."""
    import altair as alt

    base = _base(cells, runs).encode(
        x=alt.X("e2e_p95:Q", title=titled("e2e_p95"), scale=alt.Scale(zero=False, padding=20)),
        y=alt.Y("tokens_per_s:Q", title=titled("tokens_per_s"), scale=alt.Scale(zero=False)),
        color=_colour(runs),
    )
    lines = base.mark_line(opacity=0.6).encode(
        strokeDash=_dash(cells), detail="arm:N", order="load:Q"
    )
    points = base.mark_point(size=90, filled=True, opacity=0.9).encode(
        shape=_shape(cells), tooltip=_tips(cells)
    )
    words = base.mark_text(dy=-11, fontSize=10).encode(text="load:N")
    layers = lines + points
    return layers + words if cells["load"].nunique() > 1 else layers


def _over_time(traces: Sequence[Mapping[str, Any]], kind: str, name: str) -> pd.DataFrame:
    """One repeat's samples, the first, of every arm at the greatest load; thinned out."""
    top = max((run["load"] for run in traces), default=0)
    rows = []
    for run in traces:
        samples = run["trace"][kind]
        if run["repeat"] or run["load"] != top or not samples:
            continue
        step = -(-len(samples) // POINTS)
        same = {key: run[key] for key in ("arm", "policy", "shared", "ablation")}
        rows += [
            {**same, "label": run["arm"], "at_s": round(s["at_s"], 2), "value": s[name]}
            for s in samples[::step]
        ]
    return pd.DataFrame(rows)


def _lines(frame: pd.DataFrame, title: str, runs: pd.DataFrame) -> Any:
    import altair as alt

    return (
        _base(frame, runs)
        .mark_line(interpolate="step-after", opacity=0.8)
        .encode(
            x=alt.X("at_s:Q", title="seconds since the run began"),
            y=alt.Y("value:Q", title=title),
            color=_colour(runs),
            strokeDash=_dash(frame),
            detail="arm:N",
            tooltip=_tips(frame),
        )
    )


def _strip(runs: pd.DataFrame, metric: str) -> Any:
    """Every run as a mark, a line per arm."""
    import altair as alt

    keys = ["arm", "policy", "shared", "ablation", "load", "repeat", metric]
    frame = runs[keys].assign(label=runs["arm"] + _loads(runs))
    return (
        _base(frame, runs)
        .mark_point(size=60, filled=True, opacity=0.7)
        .encode(
            x=alt.X(f"{metric}:Q", title=titled(metric), scale=alt.Scale(zero=False, padding=15)),
            y=alt.Y("arm:N", title=None, sort=None, axis=alt.Axis(labelLimit=150)),
            color=_colour(runs, shown=False),
            shape=_shape(frame),
            tooltip=[*_tips(frame), alt.Tooltip("repeat:Q")],
        )
        .properties(height=alt.Step(22))
    )
