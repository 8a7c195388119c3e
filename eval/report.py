"""One self-contained HTML page from one or more results: no script, no outside resource."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from . import plots
from .compare import FIGURES
from .errors import ResultsError
from .findings import findings
from .overview import overview_table
from .provenance import device_label, portable
from .report_plots import FEW_ARMS, Plot, figures_plots, result_plots, table_plots
from .results import write_new
from .rows import rows_of, study_name
from .table import memory_lines, number, token_lines, warning_lines

TEMPLATE = "report.html.j2"
MILLISECOND_UNITS = {"s": ("ms", 1000.0), "share": ("%", 100.0), "bytes": ("MB", 1e-6)}


def write_report(
    results: Sequence[Mapping[str, Any]], path: Path, figures: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Render the results, and figures files beside them, into a new file and return its path.

    Raises:
        ResultsError: nothing to show, or the file exists.
    """
    if not results and not figures:
        raise ResultsError("report: at least one result is needed")
    write_new(path, render(results, figures))
    return path


def write_pngs(
    results: Sequence[Mapping[str, Any]], figures: Sequence[Mapping[str, Any]], folder: Path
) -> int:
    """Write every plot of the report as a PNG file into a folder; returns how many.

    Raises:
        ResultsError: the folder cannot be made or written.
    """
    shown = table_plots(_table_rows(results, figures))
    shown += [plot for result in results for plot in result_plots(result)]
    shown += [plot for document in figures for plot in figures_plots(document)]
    make_folder(folder)
    try:
        for plot in shown:
            (folder / f"{plot.name}.png").write_bytes(plots.to_png(plot.figure))
    except OSError as error:
        raise ResultsError(f"--png {folder}: {error.strerror}") from error
    return len(shown)


def make_folder(folder: Path) -> None:
    """Make the folder of `--png`. Raises ResultsError if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResultsError(f"--png {folder}: {error.strerror}") from error


def render(results: Sequence[Mapping[str, Any]], figures: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    rows = _table_rows(results, figures)
    return environment.get_template(TEMPLATE).render(
        sections=[section(result) for result in results],
        overview=overview_table(rows) if rows else None,
        findings=findings(rows),
        overview_plots=inline(table_plots(rows)),
        frontier=any(document["topic"] == "capacity" for document in figures),
        figures=[figures_section(document) for document in figures],
    )


def _table_rows(
    results: Sequence[Mapping[str, Any]], figures: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Rows of the studies, or of the table in a figures file, which stands for its cells."""
    rows: list[Mapping[str, Any]] = [*rows_of([result for result in results if "study" in result])]
    return rows or [row for document in figures for row in document.get("rows", ())]


def section(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows of one result."""
    runs, few = result["runs"], len(result["summary"]) <= FEW_ARMS + 1
    return {
        "title": f"{result['model']['name']}, {study_name(result)}",
        "facts": headline_facts(result),
        "cards": [card(entry) for entry in result["comparisons"]] if few else [],
        "tokens": [*token_lines(result), *memory_lines(result)],
        "arms": result["arms"],
        "summary": summary_table(result),
        "ratios": ratio_table(result),
        "plots": inline(result_plots(result)),
        "runs": [run_row(run) for run in runs],
        "warnings": warning_lines(result),
        "config": table_of(result["config"]),
        "workload": table_of(result["workload"]),
        "dataset": table_of(result["dataset"]),
        "versions": table_of(
            {**result["versions"], "patch series": result["patch_series"] or "none"}
        ),
        "machine": table_of(result["machine"]),
        "command": result["command"],
        "servers": {run["arm"]: run["command"] for run in runs},
    }


def headline_facts(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The line under the title."""
    at = [str(run["at"]) for run in result["runs"] if "at" in run]  # cells of a grid
    return [
        ("measured", f"{min(at)} to {max(at)}" if at else str(result["started"])),
        ("machine", device_label(dict(result["machine"]))),
        ("repeats", _repeats(result)),
        ("requests per run", str(result["workload"]["requests"])),
        ("commit", ", ".join(map(_commit, result.get("commits", [result["commit"]])))),
    ]


def _repeats(result: Mapping[str, Any]) -> str:
    """How many, and how many of them every arm has, where that is not all."""
    planned = int(result["config"]["repeats"])
    done = Counter(run["arm"] for run in result["runs"])
    least = min(done.values(), default=0)
    return str(planned) if least == planned else f"{least} of {planned} for every arm"


def _commit(commit: str | None) -> str:
    dirty = " (with local changes)" if commit and commit.endswith("-dirty") else ""
    return str(commit or "none")[:12] + dirty


def card(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The two ratios that matter most of one arm to its reference."""
    shown = []
    for path, label in (("request_throughput", "throughput"), ("e2e.p95", "p95 latency")):
        ratio = entry["ratios"].get(path)
        if ratio is not None:
            change = 100 * (ratio["median"] - 1)
            shown.append(
                {
                    "label": label,
                    "value": f"{ratio['median']:.3f}",
                    "change": f"{change:+.1f} %",
                    "range": f"{ratio['min']:.3f}–{ratio['max']:.3f}",
                }
            )
    return {"arm": entry["arm"], "reference": entry["reference"], "figures": shown}


def shown_unit(path: str) -> tuple[str, float]:
    """Unit a figure is shown in, and what to multiply its value by."""
    unit = FIGURES[path][1]
    return MILLISECOND_UNITS.get(unit, (unit, 1.0))


def summary_table(result: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as rows, arms as columns: median with minimum and maximum."""
    arms = list(result["summary"])
    rows = []
    for path, (label, _, _) in FIGURES.items():
        if not any(path in result["summary"][arm] for arm in arms):
            continue
        unit, factor = shown_unit(path)
        cells = []
        for arm in arms:
            figure = result["summary"][arm].get(path)
            if figure is None:
                cells.append({"value": "-", "range": ""})
                continue
            low, high = number(figure["min"] * factor), number(figure["max"] * factor)
            cells.append({"value": number(figure["median"] * factor), "range": f"{low}–{high}"})
        rows.append({"label": label, "unit": unit, "cells": cells})
    return {"arms": arms, "rows": rows}


def ratio_table(result: Mapping[str, Any]) -> dict[str, Any]:
    """Figures as rows, arm / reference pairs as columns; marks which way is better."""
    pairs = result["comparisons"]
    rows = []
    for path, (label, _, more_is_better) in FIGURES.items():
        if more_is_better is None:
            continue
        cells = []
        for entry in pairs:
            ratio = entry["ratios"].get(path)
            cells.append(
                {
                    "value": f"{ratio['median']:.3f}" if ratio else "-",
                    "range": f"{ratio['min']:.3f}–{ratio['max']:.3f}" if ratio else "",
                }
            )
        rows.append(
            {"label": label, "better": "higher" if more_is_better else "lower", "cells": cells}
        )
    return {"pairs": [f"{entry['arm']} / {entry['reference']}" for entry in pairs], "rows": rows}


def inline(shown: Sequence[Plot]) -> list[dict[str, Any]]:
    """Plots as the template takes them."""
    return [{"caption": plot.caption, "svg": Markup(plots.to_svg(plot.figure))} for plot in shown]


def figures_section(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the template shows of one figures file."""
    rows = []
    for name, figure in sorted(document["figures"].items()):
        spread = figure.get("spread") or {}
        low, high = spread.get("min"), spread.get("max")
        known = low is not None and high is not None
        rows.append(
            {
                "name": name,
                "value": _plain(figure["value"]),
                "range": f"{_plain(low)}–{_plain(high)}" if known else "",
                "unit": str(figure.get("unit") or ""),
            }
        )
    return {
        "topic": document["topic"],
        "command": str(document.get("command")),
        "device": str(document.get("device")),
        "rows": rows,
        "plots": inline(figures_plots(document)),
    }


def _plain(value: Any) -> str:
    return number(float(value)) if isinstance(value, (int, float)) else str(value)


def run_row(run: Mapping[str, Any]) -> dict[str, str]:
    """One line of the table of all runs."""
    summary = run["summary"]
    return {
        "repeat": str(run["repeat"] + 1),
        "arm": str(run["arm"]),
        "start, s": number(run["startup_s"]),
        "load before": number(run["load_average_before"]),
        "served, s": number(summary["duration_s"]),
        "tokens/s": number(summary["output_tokens_per_s"]),
        "TTFT p95, ms": number(1000 * summary["ttft"].get("p95", 0.0)),
        "ITL p95, ms": number(1000 * summary["itl"].get("p95", 0.0)),
        "e2e p95, s": number(summary["e2e"].get("p95", 0.0)),
        "CPU, s": number(summary["server_cpu_s"]),
        "failed": str(summary["failed"]),
        "output": str(summary["output_sha256"])[:10] if _told_ids(run) else "-",
    }


def _told_ids(run: Mapping[str, Any]) -> bool:
    """Whether the client tells the generated ids: SGLang's own benchmark does not."""
    return any(request["output_ids"] for request in run["requests"])


def table_of(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts as label and text, long paths cut to their last part."""
    rows = []
    for key, value in facts.items():
        if isinstance(value, (list, tuple)):
            value = " ".join(str(item) for item in value) or "none"
        rows.append((key.replace("_", " "), portable(["none" if value is None else str(value)])[0]))
    return rows
