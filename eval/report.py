"""One HTML page about measured studies: a verdict, the trade-offs, everything else folded away.

The page needs nothing from outside: plots, their script and the table of every run are inside.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from . import verdict
from .errors import ConfigError, ResultsError
from .results import number
from .store import read_runs
from .table import LABELS, METRICS, long_table, runs_table, summary, wide

TEMPLATES = Path(__file__).parent / "templates"
MANY = 8
FIRST = ("quality_memory", "quality_throughput", "throughput_latency", "pool")
TITLES = {
    "quality_memory": "Quality against memory",
    "quality_throughput": "Quality against throughput",
    "throughput_latency": "Throughput against latency",
    "pool": "Memory held over time",
    "running": "Requests running over time",
}
SHOWN = ("tokens_per_s", "held_per_request", "e2e_p95", "ttft_p95", "quality", "recall")
Study = tuple[dict[str, Any], list[dict[str, Any]]]


def read_studies(paths: Sequence[Path]) -> list[Study]:
    """Every study at or below the paths (a file, a study's folder, or a folder of such).

    Raises:
        ResultsError: nothing measured there.
    """
    found: list[Study] = []
    for path in paths:
        files = sorted(path.glob("**/runs.jsonl")) if path.is_dir() else [path]
        if not files:
            raise ResultsError(f"{path}: no measured study in it (no runs.jsonl)")
        found += [read_runs(file) for file in files]
    if not any(runs for _, runs in found):
        raise ResultsError(f"{', '.join(map(str, paths))}: not one run was measured")
    return [study for study in found if study[1]]


def check_extras() -> None:
    """Raise ConfigError if a package that draws is missing: better before hours of measuring."""
    for name in ("altair", "jinja2", "vl_convert"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            rule = "the report needs the extra eval: pip install 'vtoken-sglang[eval]'"
            raise ConfigError("report", rule, name) from error


def write_report(studies: Sequence[Study], path: Path) -> Path:
    """Write the page, and beside it `runs.csv` with a row per run.

    Raises:
        ConfigError: the packages that draw are missing.
        ResultsError: the file cannot be written.
    """
    page, runs = render(studies)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
        runs.to_csv(path.with_name("runs.csv"), index=False)
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from error
    return path


def render(studies: Sequence[Study]) -> tuple[str, pd.DataFrame]:
    """The page, and the table of every run that it holds."""
    check_extras()
    import altair as alt
    import jinja2
    import vl_convert

    runs = runs_table(studies)
    cells = summary(long_table(runs))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["number"] = number
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    page = environment.get_template("report.html.j2").render(
        studies=[_study(study, runs, cells) for study in studies],
        metrics=METRICS,
        shown=SHOWN,
        script=vl_convert.javascript_bundle(None, vl_version=version).replace(
            "</script", "<\\/script"
        ),
        csv=runs.to_csv(index=False),
        same_quality=verdict.SAME_QUALITY,
    )
    return page, runs


def _study(study: Study, runs: pd.DataFrame, cells: pd.DataFrame) -> dict[str, Any]:
    from .charts import charts_of

    head, traces = study
    name = head["name"]
    mine, of_study = runs[runs["study"] == name], cells[cells["study"] == name]
    charts = charts_of(mine, wide(of_study), traces)
    specs = {key: json.loads(chart.to_json(indent=None)) for key, chart in charts.items()}
    return {
        "head": head,
        "best": verdict.best_of(cells, name),
        "sharing": verdict.sharing_of(runs, name),
        "specs": specs,
        "titles": {key: TITLES.get(key) or _title_of(key) for key in specs},
        "first": [key for key in FIRST if key in specs],
        "arms": list(dict.fromkeys(mine["arm"])),
        "shown_first": _shown_first(mine),
        "rows": _rows(of_study),
        "columns": [name for name in SHOWN if name in set(of_study["metric"])],
        "all_columns": [name for name in METRICS if name in set(of_study["metric"])],
        "failed": int(mine["failed"].sum()),
        "repeats": int(mine["repeat"].nunique()),
    }


def _shown_first(runs: pd.DataFrame) -> list[str]:
    """The arms that a page with many of them draws until it is told otherwise."""
    arms = runs.drop_duplicates("arm")
    if len(arms) > MANY:
        arms = arms[arms["native"].astype(bool) | (arms["shared"] == "auto")]
    return list(arms["arm"])


def _title_of(key: str) -> str:
    return verdict.titled(key.removeprefix("runs_")).capitalize() + ", every run"


def _rows(cells: pd.DataFrame) -> list[dict[str, Any]]:
    """Per arm and load its labels and, by metric, the figures of the summary."""
    rows = []
    for (arm, load), group in cells.groupby(["arm", "load"], sort=False):
        first = group.iloc[0]
        figures = {row["metric"]: row for _, row in group.iterrows()}
        labels = {name: first[name] for name in LABELS}
        rows.append(
            {"arm": arm, "load": load, "native": first["native"], **labels, "figures": figures}
        )
    return rows


def pictures(studies: Sequence[Study], folder: Path) -> list[Path]:
    """Every first plot as an SVG file, for texts that show one."""
    from .charts import charts_of

    folder.mkdir(parents=True, exist_ok=True)
    runs = runs_table(studies)
    cells = summary(long_table(runs))
    written = []
    for head, traces in studies:
        name = head["name"]
        mine = runs[runs["study"] == name]
        charts: Mapping[str, Any] = charts_of(mine, wide(cells[cells["study"] == name]), traces)
        for key in FIRST:
            if key in charts:
                path = folder / f"{name}-{key}.svg"
                charts[key].properties(width=520).save(str(path))
                written.append(path)
    return written
