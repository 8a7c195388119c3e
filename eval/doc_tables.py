"""The tables of docs/*.md and README, as Markdown by the name of their mark, from figures files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .findings import findings
from .markdown import table
from .overview import main_tables
from .table import ranged

Figures = Mapping[str, Mapping[str, Any]]
STRATEGIES: Final = ("none", "skip", "mask", "cow", "auto")
CAPACITY_ARMS: Final = ("native", "naive", "skip", "auto")
LONG: Final = 2048  # tokens of a prefix from which a cell is in the table of long ones
CELL_HEAD: Final = "degree, prefix, keep, policy"
CELL: Final = re.compile(r"auto_vs_skip_(degree(\d+)_prefix(\d+)_keep(\d+)_(\w+))")


def doc_tables(document: Mapping[str, Any]) -> dict[str, str]:
    """Every table that the document has the figures for; none for other topics."""
    figures = document["figures"]
    if document["topic"] == "cow":
        return _sharing(figures)
    if document["topic"] == "capacity":
        return _capacity(document)
    if document["topic"] == "eval":
        return _eval(document["rows"])
    return {}


# -- shared prefixes --------------------------------------------------------------------------


def _sharing(figures: Figures) -> dict[str, str]:
    matches = [match for match in map(CELL.fullmatch, figures) if match]
    cells = sorted(
        (int(prefix), int(keep), int(degree), policy, name)
        for name, degree, prefix, keep, policy in (match.groups() for match in matches)
    )
    short = [cell for cell in cells if cell[0] < LONG]
    long = [cell for cell in cells if cell[0] >= LONG]
    found: dict[str, str] = {}
    if short:
        found |= {
            "throughput": table(
                [CELL_HEAD, *STRATEGIES, "auto / skip", "auto / best of the others"],
                [
                    [_label(cell), *_each(figures, "throughput", cell[-1], "{:.2f}"),
                     _ratio(figures[f"auto_vs_skip_{cell[-1]}"]), _best(figures, cell[-1])]
                    for cell in short
                ],
            ),
            "held": table(
                [CELL_HEAD, *STRATEGIES],
                [
                    [_label(cell), *(
                        f"{_value(figures, s, 'used_each', cell[-1]):.0f}; "
                        f"{_value(figures, s, 'running_mean', cell[-1]):.1f}"
                        for s in STRATEGIES
                    )]
                    for cell in short
                ],
            ),
            "by degree": table(
                ["requests per prefix", "throughput, auto / skip",
                 "tokens held per running request: nothing evicted, skip, auto"],
                [
                    [str(cell[2]), _ratio(figures[f"auto_vs_skip_{cell[-1]}"]), ", ".join(
                        f"{_value(figures, s, 'used_each', cell[-1]):.0f}"
                        for s in ("none", "skip", "auto")
                    )]
                    for cell in short
                    if cell[0] == 512 and cell[1] == 30
                ],
            ),
        }  # fmt: skip
    if long:
        found["long"] = table(
            ["prefix", *STRATEGIES, "auto / skip", f"tokens held: {', '.join(STRATEGIES)}"],
            [
                [str(cell[0]), *_each(figures, "throughput", cell[-1], "{:.2f}"),
                 _ratio(figures[f"auto_vs_skip_{cell[-1]}"]),
                 ", ".join(_each(figures, "used_each", cell[-1], "{:.0f}"))]
                for cell in long
            ],
        )  # fmt: skip
    return found


def _label(cell: tuple[int, int, int, str, str]) -> str:
    prefix, keep, degree, policy, _ = cell
    return f"{degree}, {prefix}, {keep / 100:g}, `{policy}`"


def _value(figures: Figures, strategy: str, metric: str, cell: str) -> float:
    return float(figures[f"{strategy}_{metric}_{cell}"]["value"])


def _each(figures: Figures, metric: str, cell: str, form: str) -> list[str]:
    return [form.format(_value(figures, strategy, metric, cell)) for strategy in STRATEGIES]


def _best(figures: Figures, cell: str) -> str:
    figure = figures[f"auto_vs_best_{cell}"]
    other = figure["unit"].partition("auto / ")[2].partition(",")[0]
    return f"{_ratio(figure)} ({other})"


def _ratio(figure: Mapping[str, Any]) -> str:
    return ranged({**figure["spread"], "median": figure["value"]})


# -- capacity ---------------------------------------------------------------------------------


def _capacity(document: Mapping[str, Any]) -> dict[str, str]:
    figures, pools = document["figures"], document["settings"]["pools"]
    cases = [(workload, pool) for workload in sorted(pools, reverse=True)
             for pool in sorted(pools[workload], key=pools[workload].__getitem__)]  # fmt: skip

    def rows(cells: Any) -> list[list[str]]:
        return [
            [f"{workload.replace('_', '-')}, {pools[workload][pool]}",
             *cells(f"{workload}_{pool}")]
            for workload, pool in cases
        ]  # fmt: skip

    def counts(name: str, case: str, form: str = "{:.0f}") -> list[str]:
        return [form.format(figures[f"{arm}_{name}_{case}"]["value"]) for arm in CAPACITY_ARMS]

    def frontier(case: str) -> list[str]:
        ratio = figures[f"frontier_ratio_{case}"]["value"]
        share = figures[f"admitted_share_{case}"]["value"]
        return [*counts("frontier", case), f"{ratio:.2f}", f"{100 * share:.0f} %"]

    def retracting(case: str) -> list[str]:
        taken = counts("retracted", case)
        return [
            f"{peak}; {back}"
            for peak, back in zip(counts("frontier_retracting", case), taken, strict=True)
        ]

    head = ["workload, pool in tokens", *CAPACITY_ARMS]
    sla = [name for name in figures if name.startswith("sla_throughput_ratio_")]
    return {
        "frontier": table(
            [*head, "auto / native", "of what the pool could hold"], rows(frontier)
        ),
        "retracting": table(head, rows(retracting)),
        "latency frontier": table(head, rows(lambda case: counts("latency_frontier", case))),
        "burst throughput": table(
            head, rows(lambda case: counts("burst_throughput", case, "{:.1f}"))
        ),
        "sla": table(
            ["policy", "throughput within the limit, auto / native"],
            [[f"`{name.removeprefix('sla_throughput_ratio_')}`", f"{figures[name]['value']:.2f}"]
             for name in sla],
        ),
    }  # fmt: skip


# -- the full table ---------------------------------------------------------------------------


def _eval(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    answers = "\n\n".join(
        "\n".join([f"**{question}**", "", *(f"- {line}" for line in lines)])
        for question, lines in findings(rows)
    )
    blocks = "\n\n".join(
        f"### `{study}`\n\n{table(lines[0], lines[1:])}"
        for study, lines in main_tables(rows).items()
    )
    return {"answers": answers, "table": blocks}
