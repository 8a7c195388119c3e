"""What the figures come to, as data: the best cell, and copy-on-write against skip and mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from .table import CELL, METRICS, paired

SAME_QUALITY = 0.95
"""Share of full attention's right answers that counts as the same quality."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median, least and greatest of a ratio over repeats, and how many there are."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        spread = f" [{self.low:.2f}, {self.high:.2f}]" if self.pairs > 1 else ""
        return f"{self.median:.2f}{spread}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The pruned cell of highest throughput over native's that keeps quality, else the highest.

    Fields:
        keeps_quality: None where quality was not measured.
    """

    study: str
    arm: str
    load: int
    throughput: Ratio
    memory: Ratio | None
    latency: Ratio | None
    quality: float | None
    native_quality: float | None
    keeps_quality: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """One way with shared pages over another, for the same policy and amount.

    Fields:
        throughput, memory: ratios within a repeat; None where that was not measured.
        same_answers: whether every token generated is the same, as it must be against mask.
    """

    arm: str
    other: str
    throughput: Ratio | None
    memory: Ratio | None
    same_answers: bool


def ratio_of(values: Sequence[float]) -> Ratio | None:
    """None for no values."""
    if not values:
        return None
    series = pd.Series(values)
    return Ratio(float(series.median()), float(series.min()), float(series.max()), len(values))


def best_of(cells: pd.DataFrame, study: str) -> Best | None:
    """Of a study's summary; None where nothing is pruned."""
    of_study = cells[cells["study"] == study]
    mine = of_study.set_index([*CELL, "metric"])
    pruned = of_study[of_study["policy"] != "none"]
    unpruned = of_study[of_study["native"].astype(bool) & (of_study["metric"] == "quality")]
    native = dict(zip(unpruned["load"], unpruned["value"], strict=True))
    candidates = []
    for (_, arm, load), _ in pruned.groupby(CELL, sort=False):
        throughput = _ratio(mine, (study, arm, load), "tokens_per_s")
        if throughput is None:
            continue
        quality = _value(mine, (study, arm, load), "quality")
        ratio = _ratio(mine, (study, arm, load), "quality")
        keeps = None if quality is None or ratio is None else ratio.median >= SAME_QUALITY
        candidates.append(
            Best(
                study=study,
                arm=arm,
                load=int(load),
                throughput=throughput,
                memory=_ratio(mine, (study, arm, load), "held_per_request"),
                latency=_ratio(mine, (study, arm, load), "e2e_p95"),
                quality=quality,
                native_quality=native.get(load),
                keeps_quality=keeps,
            )
        )
    kept = [one for one in candidates if one.keeps_quality is not False]
    return max(kept or candidates, key=lambda one: one.throughput.median, default=None)


def _value(mine: pd.DataFrame, cell: tuple[str, str, int], metric: str) -> float | None:
    return float(mine.loc[(*cell, metric), "value"]) if (*cell, metric) in mine.index else None


def _ratio(mine: pd.DataFrame, cell: tuple[str, str, int], metric: str) -> Ratio | None:
    if (*cell, metric) not in mine.index:
        return None
    row = mine.loc[(*cell, metric)]
    if pd.isna(row["ratio"]):
        return None
    low, middle, high = (float(row[name]) for name in ("ratio_low", "ratio", "ratio_high"))
    return Ratio(middle, low, high, int(row["repeats"]))


def sharing_of(runs: pd.DataFrame, study: str) -> list[Against]:
    """auto over skip and over mask, arm by arm."""
    mine = runs[runs["study"] == study]
    arms = list(dict.fromkeys(mine["arm"]))
    ways = dict(zip(mine["arm"], mine["shared"], strict=True))
    place = ["load", "repeat"]
    found = []
    for arm in arms:
        for other in (arm.replace("auto", way) for way in ("skip", "mask")):
            if ways[arm] != "auto" or other not in arms:
                continue
            ratios = [
                ratio_of(paired(mine, metric, arm, other)) if metric in mine else None
                for metric in ("tokens_per_s", "held_per_request")
            ]
            tokens = [
                mine[mine["arm"] == name].set_index(place)["output_sha256"] for name in (arm, other)
            ]
            both = tokens[0].index.intersection(tokens[1].index)
            found.append(
                Against(
                    arm=arm,
                    other=ways[other],
                    throughput=ratios[0],
                    memory=ratios[1],
                    same_answers=bool((tokens[0][both] == tokens[1][both]).all()),
                )
            )
    return found


def titled(metric: str) -> str:
    """A metric's title with its unit."""
    title, unit = METRICS[metric]
    return f"{title}, {unit}"
