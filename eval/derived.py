"""Figures of a run that follow from what its cell holds, made whenever cells are read.

Pages of arms with different page sizes cannot be compared, tokens can; sums over forks whose log
was cut off cannot, means can. And a 0 that stands for "nobody looked" must not be shown as one:
SGLang's own client tells neither queueing nor retractions, and bytes copied are not known where
the size of a token is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .arms import ARMS


def with_derived_figures(
    runs: Sequence[Mapping[str, Any]], outlined: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The runs with these figures in their summaries; `outlined` is a `document.outline`."""
    sized = bool(outlined["model"].get("kv_bytes_per_token"))
    client = bool(outlined["workload"].get("client"))
    default = int(outlined["config"]["page_size"])
    completed = []
    for run in runs:
        summary = dict(run["summary"])
        arm = ARMS.get(str(run["arm"]))
        page_size = (arm.page_size if arm is not None else None) or default
        for pages, tokens in (
            ("freed_pages", "freed_tokens"),
            ("private_pages_per_request", "private_tokens_per_request"),
        ):
            if pages in summary:
                summary[tokens] = summary[pages] * page_size
        if summary.get("forks_logged"):
            for kind in ("predicted", "realised"):
                total = summary[f"fork_{kind}_pages"]
                summary[f"{kind}_pages_per_fork"] = total / summary["forks_logged"]
        if not sized:
            summary.pop("copied_bytes", None)
        if client:
            _tell_only_what_was_seen(summary, run["pool"])
        completed.append({**run, "summary": summary})
    return completed


def _tell_only_what_was_seen(summary: dict[str, Any], pool: Sequence[Mapping[str, Any]]) -> None:
    """Retractions from the server's counter, and no queueing times."""
    summary.pop("queue", None)
    summary.pop("retractions", None)
    if pool:
        summary["retractions"] = pool[-1]["retracted"] - pool[0]["retracted"]
