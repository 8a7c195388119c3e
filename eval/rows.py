"""The full table: one row per workload, setting and arm, and the file `docs/results/eval.json`.

The file has the form of every figures file (see `figures`) and a list `rows` besides:

    {"workload", "study", "setting", "arm", "repeats", "commits",
     "figures": {name: {"median", "min", "max"}},
     "ratios": {reference: {name: {"median", "min", "max"}}}}

Ratios are taken inside a repeat. A file is replaced only by one that has at least its rows, each
with at least as many repeats, unless it is forced to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .compare import FIGURES, arm_names, paired_ratios
from .errors import FiguresError
from .figures import read_figures, replace_json
from .metrics import spread
from .provenance import device_label
from .results import rounded

REFERENCES = ("native", "naive", "skip", "mask", "p1")
RATIOS = (
    "output_tokens_per_s", "goodput", "ttft.p95", "e2e.p95", "server_cpu_ms_per_token",
    "used_tokens_per_request",
)  # fmt: skip
SLA_FACTOR = 1.05
HEADLINES = {
    "throughput": "output_tokens_per_s",
    "held_tokens": "used_tokens_per_request",
    "p95": "e2e.p95",
}
SHARED_SETTINGS = ("page_size", "pool", "device", "dtype", "seed", "repeats")


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every row of the given result documents, in their order."""
    rows = []
    for result in results:
        runs = result["runs"]
        for arm in arm_names(runs):
            figures = {name: _short(figure) for name, figure in result["summary"][arm].items()}
            rows.append(
                {
                    "workload": result["workload"]["name"],
                    "study": study_name(result),
                    "setting": dict(result.get("setting", {})),
                    "arm": arm,
                    "repeats": sum(run["arm"] == arm for run in runs),
                    "commits": result.get("commits", [result["commit"]]),
                    "figures": figures,
                    "ratios": _ratios(runs, arm),
                }
            )
    _add_sla(rows)
    return rows


def study_name(result: Mapping[str, Any]) -> str:
    """The study's name; for a result of its own, its workload's."""
    return str(result.get("study", result["workload"]["name"]))


def _short(figure: Mapping[str, float]) -> dict[str, float]:
    return {key: figure[key] for key in ("median", "min", "max")}


def _ratios(runs: Sequence[Mapping[str, Any]], arm: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for reference in REFERENCES:
        if reference == arm:
            continue
        for name in RATIOS:
            values = paired_ratios(runs, arm, reference, name)
            if values:
                found.setdefault(reference, {})[name] = _short(spread(values))
    return found


def _add_sla(rows: Sequence[dict[str, Any]]) -> None:
    """Add `sla_tokens_per_s`: the most output tokens per second at which p95 latency is at most
    1.05 times the baseline's, over the concurrency levels of a study; 0 where no level is.

    The baseline is the arm native at the level where its own throughput is highest.
    """
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        rest = {key: value for key, value in row["setting"].items() if key != "concurrency"}
        key = json.dumps([row["workload"], rest], sort_keys=True)
        families.setdefault(key, []).append(row)
    for family in families.values():
        base = [row for row in family if row["arm"] == "native"]
        if not base:
            continue
        limit = SLA_FACTOR * _median(max(base, key=_throughput), "e2e.p95")
        for arm in dict.fromkeys(row["arm"] for row in family):
            levels = [row for row in family if row["arm"] == arm]
            good = [row for row in levels if 0 < _median(row, "e2e.p95") <= limit]
            best = max(map(_throughput, good), default=0.0)
            for row in levels:
                row["sla_tokens_per_s"] = best


def _median(row: Mapping[str, Any], name: str) -> float:
    return float(row["figures"].get(name, {}).get("median", 0.0))


def _throughput(row: Mapping[str, Any]) -> float:
    return _median(row, "output_tokens_per_s")


def headline_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """auto against every reference, per study: `auto_vs_skip_throughput_STUDY` and so on."""
    figures: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["arm"] != "auto":
            continue
        for reference, ratios in row["ratios"].items():
            for label, name in HEADLINES.items():
                if name in ratios:
                    ratio = ratios[name]
                    figures[f"auto_vs_{reference}_{label}_{row['study']}"] = {
                        "value": ratio["median"],
                        "unit": f"{FIGURES[name][0]}, auto / {reference}, pairs in one repeat",
                        "spread": {"min": ratio["min"], "max": ratio["max"]},
                    }
    return figures


def eval_document(results: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """The document of topic `eval`.

    Raises:
        FiguresError: no result, or a request failed.
    """
    if not results:
        raise FiguresError("figures: nothing has been measured yet")
    if any(run["summary"]["failed"] for result in results for run in result["runs"]):
        raise FiguresError("figures: not written, some requests failed")
    rows, last = rows_of(results), results[-1]
    settings = {key: last["config"][key] for key in SHARED_SETTINGS}
    settings |= {"model": last["model"]["name"], "patch_series": last["patch_series"]}
    settings["workloads"] = sorted({row["workload"] for row in rows})
    document = {
        "topic": "eval",
        "command": command,
        "commit": last["commit"],
        "device": device_label(dict(last["machine"])),
        "versions": last["versions"],
        "settings": settings,
        "repeats": min(row["repeats"] for row in rows),
        "figures": headline_figures(rows),
        "rows": rows,
    }
    plain: dict[str, Any] = rounded(document)
    return plain


def write_eval(path: Path, document: Mapping[str, Any], force: bool = False) -> None:
    """Write the document in one step.

    Raises:
        FiguresError: the file there has a row that the document lacks, or has with more repeats;
            it is then as before.
    """
    existing = read_figures(path)
    if existing is not None and not force:
        new = {_key(row): row["repeats"] for row in document["rows"]}
        lost = [
            f"{row['study']} {row['arm']}"
            for row in existing.get("rows", ())
            if new.get(_key(row), 0) < row["repeats"]
        ]
        if lost:
            raise FiguresError(
                f"figures: {path} would lose rows or repeats ({', '.join(lost[:5])}); measure at "
                "least as much, or pass --force"
            )
    replace_json(path, document)


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["study"]), str(row["arm"])
