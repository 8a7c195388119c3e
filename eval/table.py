"""One table of everything measured: a row per run, then a row per cell and metric.

`runs_table` has a row per run, `long_table` a row per run and metric with the ratio to native in
the same repeat beside the value, `summary` a row per arm, load and metric: median and extremes over
repeats of value and ratio. Ratios are taken inside a repeat, where speeds drift least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

KEYS = ["study", "arm", "load", "repeat"]
LABELS = ["policy", "keep", "budget", "shared", "ablation"]
CELL = ["study", "arm", "load"]
NESTED = ("kind", "request", "trace", "answers", "url", "at")
# metric -> (title, unit)
METRICS: dict[str, tuple[str, str]] = {
    "tokens_per_s": ("throughput", "tokens/s"),
    "held_per_request": ("memory held per running request", "tokens"),
    "peak_held_tokens": ("memory held at most", "tokens"),
    "peak_running": ("requests running at once, at most", "requests"),
    "ttft_p50": ("time to first token, median", "s"),
    "ttft_p95": ("time to first token, p95", "s"),
    "tpot_p50": ("time per further token, median", "s"),
    "e2e_p50": ("whole request, median", "s"),
    "e2e_p95": ("whole request, p95", "s"),
    "queue_p95": ("wait in the queue, p95", "s"),
    "computed_tokens": ("prompt tokens computed", "tokens"),
    "cached_share": ("prompt tokens from the cache", "share"),
    "cpu_ms_per_token": ("CPU time of the server per token", "ms"),
    "quality": ("questions answered right", "share"),
    "recall": ("right answers in the load itself", "share"),
    "goodput": ("requests in time per second", "requests/s"),
    "retractions": ("requests taken back", "requests"),
    "evicted_tokens": ("tokens evicted", "tokens"),
    "moved_tokens": ("tokens copied", "tokens"),
    "forks": ("prefixes copied", "prefixes"),
    "private_pages": ("pages of a pruned request's own", "pages"),
    "waste_f": ("F, empty share of those pages", "share"),
    "waste_f_after": ("F right after a copy", "share"),
    "limit_gap": ("pages over the fewest possible, right after a copy", "share"),
}


def runs_table(
    studies: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]],
) -> pd.DataFrame:
    """A row per run of every (head, runs); what a study could not read is NaN."""
    rows = [
        {"study": head["name"], "native": run["arm"] == head["baseline"]}
        | {key: value for key, value in run.items() if key not in NESTED}
        for head, runs in studies
        for run in runs
    ]
    frame = pd.DataFrame(rows)
    for name in (*KEYS, *LABELS, "native"):
        if name not in frame:
            frame[name] = pd.Series(dtype=object)
    ordered = [*KEYS, *LABELS, "native"]
    return frame[ordered + [name for name in frame if name not in ordered]]


def long_table(runs: pd.DataFrame) -> pd.DataFrame:
    """A row per run and metric: `value`, and `ratio` to the baseline's in the same study, load and
    repeat (NaN where it has none, or where that is 0)."""
    metrics = [name for name in METRICS if name in runs]
    melted = runs.melt(
        id_vars=[*KEYS, *LABELS, "native"], value_vars=metrics, var_name="metric"
    ).dropna(subset=["value"])
    melted["value"] = melted["value"].astype(float)
    place = ["study", "load", "repeat", "metric"]
    base = melted[melted["native"].astype(bool)][[*place, "value"]]
    joined = melted.merge(base.rename(columns={"value": "of"}), on=place, how="left")
    joined["ratio"] = joined["value"] / joined["of"].where(joined["of"] != 0)
    return joined.drop(columns="of")


def summary(long: pd.DataFrame) -> pd.DataFrame:
    """A row per arm, load and metric: `value`, `low`, `high`, `ratio`, `ratio_low`, `ratio_high`
    and `repeats`."""
    grouped = long.groupby([*CELL, *LABELS, "native", "metric"], dropna=False, sort=False)
    return grouped.agg(
        value=("value", "median"),
        low=("value", "min"),
        high=("value", "max"),
        ratio=("ratio", "median"),
        ratio_low=("ratio", "min"),
        ratio_high=("ratio", "max"),
        repeats=("value", "size"),
    ).reset_index()


def wide(cells: pd.DataFrame, column: str = "value") -> pd.DataFrame:
    """A row per arm and load, a column per metric."""
    index = [*CELL, *LABELS, "native"]
    found = cells.pivot_table(
        index=index, columns="metric", values=column, dropna=False, sort=False, observed=True
    )
    return found.dropna(how="all").reset_index()


def paired(runs: pd.DataFrame, metric: str, arm: str, against: str) -> list[float]:
    """`arm` / `against`, once per study, load and repeat that both have."""
    index = ["study", "load", "repeat"]
    ours, other = (runs[runs["arm"] == name].set_index(index)[metric] for name in (arm, against))
    found = (ours / other.where(other != 0)).dropna()
    return [float(value) for value in found]
