"""How long an evaluation will take, said before it starts.

A rough model of this machine: server starts of fixed length, prefill bound by arithmetic, decode
bound by reading the weights once per step. Both rates are measured here in a fraction of a second.
On an accelerator only the starts are counted, for they are what takes long there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .config import EvalConfig
from .workload import Workload

STARTUP_S = {"cpu": 32.0, "cuda": 60.0}
STOP_S = 4.0
STEP_OVERHEAD_S = 0.02  # scheduler, tokenizer and detokenizer processes, per decode step
BENCH_CLIENT_S = 25.0  # SGLang's benchmark starts anew for every run
EFFICIENCY = 0.5  # share of the probe's rate that a whole model reaches


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds: one server start, one run of the workload, and everything together.

    `complete` is false on an accelerator, where the requests' own time is not known beforehand.
    """

    start_s: float
    run_s: float
    servers: int
    complete: bool = True

    @property
    def total_s(self) -> float:
        return self.servers * (self.start_s + self.run_s)

    def text(self) -> str:
        """One line for the user."""
        if not self.complete:
            return (
                f"Estimated time: {minutes(self.total_s)} of server starts ({self.servers} of "
                f"about {self.start_s:.0f} s) and waiting; the requests come on top, and how fast "
                "this accelerator serves them is not known beforehand"
            )
        return (
            f"Estimated time: {minutes(self.total_s)} ({self.servers} server starts of about "
            f"{self.start_s:.0f} s, then about {self.run_s:.0f} s of requests each)"
        )


def minutes(seconds: float) -> str:
    """A duration as "7 min 05 s" or "45 s"."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def cpu_rates() -> tuple[float, float]:
    """Arithmetic (operations/s) and read bandwidth (bytes/s) of one core, float32."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left, right = torch.ones(256, 1024), torch.ones(1024, 1024)
        vector = torch.ones(32 * 2**20)
        multiply = _best_of(lambda: left @ right)
        read = _best_of(lambda: vector.sum())
    finally:
        torch.set_num_threads(threads)
    return 2 * 256 * 1024 * 1024 / multiply, vector.numel() * 4 / read


def _best_of(action: Any, times: int = 5) -> float:
    durations = []
    for _ in range(times):
        begin = time.perf_counter()
        action()
        durations.append(time.perf_counter() - begin)
    return max(min(durations), 1e-9)


def estimate(
    config: EvalConfig,
    workload: Workload,
    device: str,
    weight_bytes: int,
    rates: tuple[float, float] | None = None,
) -> Estimate:
    """Estimate an evaluation.

    Args:
        weight_bytes: size of the model's weight files, taken as 2 bytes per parameter.
        rates: result of `cpu_rates`; measured here when None and the device is a CPU.
    """
    run_s = 0.0
    if device == "cpu":
        arithmetic, bandwidth = rates or cpu_rates()
        parameters = weight_bytes / 2
        prefill_s = 2 * parameters * workload.new_prompt_tokens() / (arithmetic * EFFICIENCY)
        steps = workload.output_tokens() / workload.lanes
        decode_s = steps * (4 * parameters / (bandwidth * EFFICIENCY) + STEP_OVERHEAD_S)
        run_s = prefill_s + decode_s
    run_s = max(run_s, float(workload.facts.get("arrivals_end_s", 0.0)))
    if workload.bench is not None:
        run_s += BENCH_CLIENT_S
    return Estimate(
        start_s=STARTUP_S[device] + STOP_S,
        run_s=run_s,
        servers=config.repeats * len(config.arms),
        complete=device == "cpu",
    )
