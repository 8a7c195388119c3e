"""Times of device work, by events on its stream."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eval.results import spread

WARM_UPS = 5
# GPU cycles that the stream is kept busy first, about 0.1 s. While the host enqueues the runs, the
# device waits; otherwise a short kernel's time would be that of its launch.
HEAD_START = 200_000_000


def times_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each of `repeats` runs of `work` on the current CUDA stream."""
    for _ in range(WARM_UPS):
        work()
    torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call]
    pairs = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairs]


def ratio_figure(ours: list[float], reference: list[float], unit: str) -> dict[str, object]:
    """Figure of paired ratios: median, and the spread between its quartiles and extremes."""
    ratios = [mine / other for mine, other in zip(ours, reference, strict=True)]
    found = spread(ratios)
    shown = {key: found[key] for key in ("min", "q1", "q3", "max")}
    return {"value": found["median"], "unit": unit, "spread": shown}
