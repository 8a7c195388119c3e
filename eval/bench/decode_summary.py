"""Medians, ratios and figures of measured decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.metrics import spread

if TYPE_CHECKING:
    from vtoken_sglang_eval.bench.offline import StepTime

ARMS = ("stock", "native", "hook-only")
# All that fit: 32 requests of 8192 tokens do not.
FIGURE_CELLS = tuple(
    (batch, context)
    for batch in (1, 8, 32)
    for context in (256, 2048, 8192)
    if batch * context <= 8 * 8192
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid: requests in the batch, and their length in tokens at the end."""

    batch: int
    context: int


def summarize_cell(
    cell: Cell, steps: Sequence[dict[str, StepTime]], kv_bytes: int, weight_bytes: int, read: float
) -> dict[str, Any]:
    """Medians and spreads of one cell, and what its steps make of the memory bandwidth."""
    arms: dict[str, Any] = {}
    state_bytes = cell.batch * cell.context * kv_bytes
    for arm in ARMS:
        times = [step[arm] for step in steps]
        step_s = spread([time.wall_s for time in times])
        attention_s = spread([time.attention_wall_s for time in times])
        arms[arm] = {
            "step_ms": _milliseconds(step_s),
            "attention_ms": _milliseconds(attention_s),
            "step_cpu_ms": _milliseconds(spread([time.cpu_s for time in times])),
            "attention_cpu_ms": _milliseconds(spread([time.attention_cpu_s for time in times])),
            "state_gb_s": state_bytes / attention_s["median"] / 1e9,
            "attention_of_read_bandwidth": state_bytes / attention_s["median"] / read,
            "step_of_read_bandwidth": (state_bytes + weight_bytes) / step_s["median"] / read,
        }
    ratios = {}
    for name, arm, reference in (
        ("native_vs_stock", "native", "stock"),
        ("hook_only_vs_stock", "hook-only", "stock"),
        ("hook_only_vs_native", "hook-only", "native"),
    ):
        ratios[name] = spread([step[reference].wall_s / step[arm].wall_s for step in steps])
        ratios[name + "_cpu"] = spread([step[reference].cpu_s / step[arm].cpu_s for step in steps])
        ratios[name + "_attention"] = spread(
            [step[reference].attention_wall_s / step[arm].attention_wall_s for step in steps]
        )
    return {
        "batch": cell.batch,
        "context": cell.context,
        "state_bytes_per_step": state_bytes,
        "weight_bytes_per_step": weight_bytes,
        "arms": arms,
        "speed_ratios": ratios,
        "token_mismatches": {
            arm: sum(
                ours != stock
                for step in steps
                for ours, stock in zip(step[arm].tokens, step["stock"].tokens, strict=True)
            )
            for arm in ARMS[1:]
        },
    }


def _milliseconds(seconds: dict[str, float]) -> dict[str, float]:
    return {key: 1000 * value for key, value in seconds.items()}


def describe(summary: dict[str, Any]) -> str:
    """One line on a cell."""
    arms, ratio = summary["arms"], summary["speed_ratios"]["hook_only_vs_stock"]
    cpu = summary["speed_ratios"]["hook_only_vs_stock_cpu"]["median"]
    parts = ", ".join(
        f"{arm} {arms[arm]['step_ms']['median']:.1f} ms"
        f" (attention {arms[arm]['attention_ms']['median']:.1f})"
        for arm in ARMS
    )
    return (
        f"{summary['batch']}x{summary['context']}: {parts}; hook-only/stock speed"
        f" {ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}], by CPU time {cpu:.2f};"
        f" other tokens {summary['token_mismatches']}"
    )


def figures_document(result: dict[str, Any]) -> dict[str, Any]:
    """The figures of topic `serve` that a result holds (see `figures`)."""
    figures = {}
    for cell in result["cells"]:
        if (cell["batch"], cell["context"]) in FIGURE_CELLS:
            at = f"bs{cell['batch']}_ctx{cell['context']}"
            for name, ratio_of, unit in (
                ("cpu_decode_ratio", "hook_only_vs_stock", "hook-only / stock"),
                ("hook_only_step_ratio", "hook_only_vs_native", "hook-only / native"),
            ):
                ratio = cell["speed_ratios"][ratio_of]
                figures[f"{name}_{at}"] = {
                    "value": ratio["median"],
                    "unit": f"{unit} decode speed, median of steps",
                    "spread": {key: ratio[key] for key in ("min", "q1", "q3", "max")},
                }
    return serve_document(result, figures)


def serve_document(result: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Figures of topic `serve` with the provenance of the result they were taken from."""
    return {
        "topic": "serve",
        "command": result["command"],
        "commit": result["commit"],
        "device": provenance.device_label(result["machine"]),
        "versions": result["versions"],
        "settings": result["settings"],
        "repeats": result["repeats"],
        "figures": figures,
    }
