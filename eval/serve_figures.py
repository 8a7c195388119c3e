"""Figures of topic `serve` from one result: what the hooks cost when nothing is evicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .compare import paired_ratios
from .errors import FiguresError
from .metrics import spread
from .provenance import device_label
from .table import busiest_load

# figure name -> (arm, reference, path in a run's summary)
SERVE_FIGURES = {
    "hook_only_throughput_ratio": ("hook-only", "native", "request_throughput"),
    "hook_only_p95_ratio": ("hook-only", "native", "e2e.p95"),
    "hook_only_cpu_per_token_ratio": ("hook-only", "native", "server_cpu_ms_per_token"),
}
SETTINGS = (
    "workload", "page_size", "pool", "conversations", "turns", "concurrency", "system_tokens",
    "user_tokens", "out_tokens", "seed", "device", "dtype", "server_args",
)  # fmt: skip


def serve_figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures document of a result (see `figures`).

    Raises:
        FiguresError: a request failed, or the arms for these figures were not in the run.
    """
    runs = result["runs"]
    if any(run["summary"]["failed"] for run in runs):
        raise FiguresError("figures: not written, some requests failed")
    figures = {}
    for name, (arm, reference, path) in SERVE_FIGURES.items():
        ratios = paired_ratios(runs, arm, reference, path)
        if not ratios:
            raise FiguresError(f"figures: {name} needs the arms {arm} and {reference} in one run")
        figure = spread(ratios)
        figures[name] = {
            "value": figure["median"],
            "unit": f"{arm} / {reference}, median of pairs in one repeat",
            "spread": {key: figure[key] for key in ("min", "q1", "q3", "max")},
        }
    config = result["config"]
    settings = {key: config[key] for key in SETTINGS}
    settings.update(
        model=result["model"]["name"],
        dataset=result["dataset"]["name"],
        requests=runs[0]["summary"]["requests"],
        patch_series=result["patch_series"],
        busiest_load_average=busiest_load(runs),
    )
    return {
        "topic": "serve",
        "command": result["command"],
        "commit": result["commit"],
        "device": device_label(result["machine"]),
        "versions": result["versions"],
        "settings": settings,
        "repeats": config["repeats"],
        "figures": figures,
    }
