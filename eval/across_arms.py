"""Figures of a run that need another arm of the same repeat: agreement with it, and goodput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .scoring import agreement

SLO_FACTOR = 2.0  # a good request takes at most this much of the unpruned arm's median


def unpruned_run(runs: Sequence[Mapping[str, Any]], repeat: int) -> Mapping[str, Any] | None:
    """The repeat's run of the first arm among native, hook-only, stock that it has."""
    for name in ("native", "hook-only", "stock"):
        for run in runs:
            if run["arm"] == name and run["repeat"] == repeat:
                return run
    return None


def with_shared_figures(
    runs: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The runs with `agreement`, `goodput` and `good_share` in their summaries where they exist.

    A request is good if its first token came within `slo_ttft` and every further one took at most
    `slo_tpot` on average; 0 stands for twice the unpruned arm's median in the same repeat.
    Goodput is good requests per second.
    """
    completed = []
    for run in runs:
        base = unpruned_run(runs, int(run["repeat"]))
        summary = dict(run["summary"])
        if base is not None:
            limits = [
                float(config.get(f"slo_{name}") or 0) or _twice_median(base, name)
                for name in ("ttft", "tpot")
            ]
            if all(limits):
                good = sum(_is_good(request, *limits) for request in run["requests"])
                summary["goodput"] = good / summary["duration_s"]
                summary["good_share"] = good / max(1, len(run["requests"]))
                summary["slo_ttft_s"], summary["slo_tpot_s"] = limits
            same = agreement(run, base)  # of the unpruned arm with itself: 1
            if same is not None:
                summary["agreement"] = same
        completed.append({**run, "summary": summary})
    return completed


def _twice_median(run: Mapping[str, Any], name: str) -> float:
    return SLO_FACTOR * float(run["summary"].get(name, {}).get("p50", 0.0))


def _is_good(request: Mapping[str, Any], slo_ttft: float, slo_tpot: float) -> bool:
    tokens = request.get("output_tokens") or len(request["output_ids"])
    if request["error"] or request["ttft_s"] > slo_ttft:
        return False
    if tokens < 2:
        return True
    return bool((request["latency_s"] - request["ttft_s"]) / (tokens - 1) <= slo_tpot)
