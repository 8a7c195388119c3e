"""The result document: what was to be measured, then what the runs gave.

`outline` holds all that is known before the first server starts; `with_runs` adds the runs and
everything computed from them, so a document can be made again from saved runs at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .across_arms import with_shared_figures
from .arms import Arm
from .compare import check_tokens, compare_arms, summarize_arms
from .config import EvalConfig
from .derived import with_derived_figures
from .sharegpt import Dataset
from .workload import Workload


def outline(
    config: EvalConfig,
    arms: Sequence[Arm],
    dataset: Dataset,
    workload: Workload,
    model: Mapping[str, Any],
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """The document without runs. `origin`: command, versions, commit, machine (see provenance)."""
    return {
        **origin,
        "runs_planned": config.repeats * len(arms),
        "config": config.to_dict(),
        "model": dict(model),
        "dataset": {
            "name": dataset.name,
            "size_bytes": dataset.size_bytes,
            "sha256": dataset.sha256,
            "conversations": len(dataset.conversations),
            "documents": len(dataset.documents),
            "trace_requests": len(dataset.trace),
            "unusable_records": dataset.unusable,
            "dropped_chars": dataset.dropped_chars,
        },
        "workload": {
            "name": workload.name,
            "fingerprint": workload.fingerprint(),
            "requests": workload.requests,
            "longest_session_tokens": workload.longest(),
            **workload.facts,
        },
        "arms": [
            {"name": arm.name, "summary": arm.summary, "reference": arm.reference} for arm in arms
        ],
    }


def with_runs(
    outlined: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], duration_s: float
) -> dict[str, Any]:
    """The full document of the given runs (any number of them, also none)."""
    complete = with_shared_figures(with_derived_figures(runs, outlined), outlined["config"])
    first = outlined["arms"][0]["name"]
    return {
        **outlined,
        "duration_s": duration_s,
        "summary": summarize_arms(complete),
        "comparisons": compare_arms(complete),
        "tokens": {"reference": first, "arms": check_tokens(complete, first)},
        "runs": complete,
    }
