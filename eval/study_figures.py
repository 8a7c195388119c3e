"""Figures that a study's TOML file declares, from the table of its runs.

    [figures]
    topic = "core"
    [[figures.figure]]
    name = "retained_ratio_{policy}_keep{keep}_{study}"
    metric = "private_pages"
    of = { ablation = "" }          # pruned or not, every arm whose columns say so
    over = { ablation = "naive" }   # optional: divided by the arm that agrees with it otherwise

`turned` divides the other way round, `least` keeps the smallest of all. A ratio is taken inside a
repeat; a figure is the median, with the spread over repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from . import provenance
from .errors import ConfigError, FiguresError
from .figures import write_figures
from .results import figure
from .studies import read_toml
from .table import METRICS, runs_table

KEYS = {"name", "metric", "of", "over", "turned", "least"}
SAME = ["study", "load", "repeat"]
AMOUNT = ["policy", "keep", "budget"]
COLUMNS = ("study", "arm", "load", "policy", "keep", "budget", "shared", "ablation")


def write_declared(name: str, studies: Sequence[Any], into: Path, force: bool) -> dict[str, Any]:
    """Merge the figures that the file declares into `into`; returns the document.

    Raises:
        ConfigError: the file declares none, or wrongly.
        FiguresError: a figure has no runs, or a larger measurement would be replaced.
    """
    declared = read_toml(name).get("figures", {})
    if not declared.get("figure") or "topic" not in declared:
        raise ConfigError(
            "--figures", "the file must have [figures] with a topic and figures", name
        )
    runs = runs_table(studies)
    if failed := int(runs["failed"].sum()):
        raise FiguresError(f"figures: not written, {failed} requests failed")
    found: dict[str, dict[str, Any]] = {}
    for entry in declared["figure"]:
        found |= figures_of(runs, entry)
    head = studies[-1][0]
    commits = sorted({str(one["commit"]) for one, _ in studies})
    document = {
        "topic": declared["topic"],
        "command": head["command"],
        "commit": commits[0] if len(commits) == 1 else ", ".join(commits),
        "device": provenance.device_label(head["machine"]),
        "versions": head["versions"],
        "settings": {"model": head["model"]["name"], "dtype": head["options"]["dtype"]},
        "repeats": min(int(part["repeat"].nunique()) for _, part in runs.groupby("study")),
        "figures": found,
    }
    return write_figures(into, document, force)


def figures_of(runs: pd.DataFrame, entry: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of one declaration, by name.

    Raises:
        ConfigError: an unknown key, metric or column.
        FiguresError: no run is meant.
    """
    if unknown := sorted(entry.keys() - KEYS):
        raise ConfigError("figures", f"keys must be among {', '.join(sorted(KEYS))}", unknown[0])
    metric = entry["metric"]
    if metric not in METRICS:
        raise ConfigError("figures", f"metric must be among {', '.join(METRICS)}", metric)
    title, unit = METRICS[metric]
    over = entry.get("over")
    label = f"{title}, {_text(over)}" if over is None else f"{title}, ratio to {_text(over)}"
    if entry.get("turned"):
        label = f"{title}, {_text(over)} over it"
    found = [
        (entry["name"].format(**cell), figure(values, label if over is not None else unit))
        for cell, values in _cells(runs, entry, metric)
    ]
    if not found:
        raise FiguresError(f"figures: no run is meant by {entry['name']}")
    if entry.get("least"):
        return dict([min(found, key=lambda one: float(one[1]["value"]))])
    return dict(found)


def _cells(
    runs: pd.DataFrame, entry: Mapping[str, Any], metric: str
) -> Iterator[tuple[dict[str, Any], list[float]]]:
    """Every arm and load that `of` means, with its values, or ratios, over repeats."""
    if metric not in runs:
        return
    ours = _meant(runs, entry["of"]).dropna(subset=[metric])
    over: dict[str, Any] | None = entry.get("over")
    other = None if over is None else _meant(runs, over).dropna(subset=[metric])
    if over is not None:
        ours = ours[~ours["native"].astype(bool)]
    for (_, _, _), part in ours.groupby(["study", "arm", "load"], sort=False):
        first = part.iloc[0]
        values = part.set_index(SAME)[metric]
        if over is not None and other is not None:
            # Otherwise alike: the same policy and amount, where the other is pruned at all.
            alike = other
            if (other["policy"] != "none").any():
                for name in [name for name in AMOUNT if name not in over]:
                    same = alike[name] == first[name]
                    alike = alike[same | (alike[name].isna() & pd.isna(first[name]))]
            base = alike.groupby(SAME)[metric].first()
            values = (base / values if entry.get("turned") else values / base).dropna()
        if len(values):
            cell = {name: first[name] for name in COLUMNS}
            if not pd.isna(cell["keep"]):
                cell["keep"] = round(100 * cell["keep"])
            yield cell, [float(value) for value in values]


def _meant(runs: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.DataFrame:
    found = runs
    for name, values in wanted.items():
        if name not in COLUMNS:
            raise ConfigError("figures", f"columns are {', '.join(COLUMNS)}", name)
        found = found[found[name].isin(values if isinstance(values, list) else [values])]
    return found


def _text(wanted: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in (wanted or {}).items())
