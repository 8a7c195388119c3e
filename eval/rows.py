"""The full table: one row per workload, setting and arm, and the file `docs/results/eval.json`.

The file has the form of every figures file (see `figures`) and a list `rows` besides:

    {"workload", "study", "setting", "arm", "repeats", "repeats_planned", "requests", "failed",
     "commits", "figures": {name: {"median", "min", "max"}},
     "ratios": {reference: {name: {"median", "min", "max", "repeats"}}},
     "same_evictions": of an arm that should evict what `reference` does, whether it answered alike
         (`compare.check_tokens`), over the repeats that both have,
     "sla_tokens_per_s": {"median", "min", "max", "repeats"}}

and, by name of the study, `studies`: all its settings, its data and the fingerprint of its
requests. `requests` are those of one repeat. Ratios are taken inside a repeat, over the repeats
that have both arms. A file is replaced only by one that has at least its rows, each with at least
as many repeats and requests, unless it is forced to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .compare import FIGURES, arm_names, paired_ratios, same_evictions
from .errors import FiguresError
from .figures import check_target, replace_json
from .metrics import spread
from .provenance import device_label
from .results import rounded
from .sla import within_limit

REFERENCES = ("native", "naive", "p1", "skip", "mask", "cow", "auto", "publish-never")
RATIOS = (
    "output_tokens_per_s", "goodput", "ttft.p95", "e2e.p95", "server_cpu_ms_per_token",
    "used_tokens_per_request",
)  # fmt: skip
SIZES = ("repeats", "requests")  # of a row: how much was measured
HEADLINES = {
    "throughput": "output_tokens_per_s",
    "held_tokens": "used_tokens_per_request",
    "p95": "e2e.p95",
}
NOT_SETTINGS = ("preset", "port", "startup_timeout", "arms", "model")


def rows_of(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every row of the given result documents, in their order."""
    rows = []
    for result, limits in zip(results, within_limit(results), strict=True):
        runs = result["runs"]
        answers = {entry["arm"]: entry for entry in same_evictions(result["tokens"]["arms"])}
        for arm in arm_names(runs):
            mine = [run for run in runs if run["arm"] == arm]
            figures = {name: _short(figure) for name, figure in result["summary"][arm].items()}
            row = {
                "workload": result["workload"]["name"],
                "study": study_name(result),
                "setting": dict(result.get("setting", {})),
                "arm": arm,
                "repeats": len(mine),
                "repeats_planned": result["config"]["repeats"],
                "requests": result["workload"]["requests"],
                "failed": sum(run["summary"]["failed"] for run in mine),
                "commits": result.get("commits", [result["commit"]]),
                "figures": figures,
                "ratios": _ratios(runs, arm),
            }
            if arm in answers:
                row["same_evictions"] = answers[arm]
            if arm in limits:
                row["sla_tokens_per_s"] = limits[arm]
            rows.append(row)
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
                ratio = {**_short(spread(values)), "repeats": len(values)}
                found.setdefault(reference, {})[name] = ratio
    return found


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
                        "repeats": ratio["repeats"],
                    }
    return figures


def eval_document(results: Sequence[Mapping[str, Any]], command: str) -> dict[str, Any]:
    """The document of topic `eval`.

    Raises:
        FiguresError: no result, or a request failed.
    """
    if not results:
        raise FiguresError("figures: nothing has been measured yet")
    rows, last = rows_of(results), results[-1]
    failed = [f"{row['study']} {row['arm']}" for row in rows if row["failed"]]
    if failed:
        raise FiguresError(
            f"figures: not written, some requests failed ({', '.join(failed)}); delete these cells "
            "and call again to measure them anew"
        )
    settings = shared_settings(results)
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
        "studies": {study_name(result): study_facts(result) for result in results},
        "rows": rows,
    }
    plain: dict[str, Any] = rounded(document)
    return plain


def shared_settings(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that every study has in common."""
    first, *others = (study_facts(result)["settings"] for result in results)
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}


def study_facts(result: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides what a study's requests are and how they are served."""
    settings = {k: v for k, v in result["config"].items() if k not in NOT_SETTINGS}
    settings["dataset"] = result["dataset"]["name"]
    return {"settings": settings, "workload": dict(result["workload"])}


def write_eval(path: Path, document: Mapping[str, Any], force: bool = False) -> None:
    """Write the document in one step.

    Raises:
        FiguresError: the file there is of another topic, or has a row that the document lacks, or
            has with more repeats or requests; it is then as before.
    """
    existing = check_target(path, document["topic"])
    if existing is not None and not force:
        new = {_key(row): row for row in document["rows"]}
        lost = [
            f"{row['study']} {row['arm']}"
            for row in existing.get("rows", ())
            if any(new.get(_key(row), {}).get(size, 0) < row.get(size, 0) for size in SIZES)
        ]
        if lost:
            raise FiguresError(
                f"figures: {path} would lose rows or repeats ({', '.join(lost[:5])}); measure at "
                "least as much, or pass --force"
            )
    replace_json(path, document)


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return str(row["study"]), str(row["arm"])
