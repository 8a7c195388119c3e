"""Comparisons between arms: ratios inside a repeat, and whether the same tokens came out.

A run is a dict with `arm`, `repeat`, `summary` (see `metrics.summarize`) and `requests`
(`client.RequestRecord` as dicts). Ratios pair an arm with its reference in the same repeat, so
that drift of the machine between repeats cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .arms import ARMS
from .metrics import figure_at, spread

Run = Mapping[str, Any]

# dotted path in a summary -> (label, unit, whether more is better; None: neither)
FIGURES: dict[str, tuple[str, str, bool | None]] = {
    "request_throughput": ("request throughput", "requests/s", True),
    "output_tokens_per_s": ("output throughput", "tokens/s", True),
    "ttft.p50": ("time to first token, p50", "s", False),
    "ttft.p95": ("time to first token, p95", "s", False),
    "goodput": ("goodput: requests within the limits", "requests/s", True),
    "itl.p50": ("inter-token latency, p50", "s", False),
    "itl.p95": ("inter-token latency, p95", "s", False),
    "e2e.p50": ("request latency, p50", "s", False),
    "e2e.p95": ("request latency, p95", "s", False),
    "e2e.p99": ("request latency, p99", "s", False),
    "tpot.p50": ("time per output token, p50", "s", None),
    "tpot.p95": ("time per output token, p95", "s", None),
    "queue.p50": ("time in the queue, p50", "s", None),
    "queue.p95": ("time in the queue, p95", "s", None),
    "server_cpu_ms_per_token": ("server CPU per output token", "ms", False),
    "used_tokens_per_request": ("pool tokens held per running request", "tokens", False),
    "mean_running": ("requests running at once, mean", "", None),
    "mean_queued": ("requests waiting, mean", "", None),
    "peak_used_tokens": ("pool tokens held by requests, peak", "tokens", None),
    "private_tokens_per_request": ("private pages per pruned request, in tokens", "tokens", None),
    "private_pages_per_request": ("private pages per pruned request (p1: of one token)", "", None),
    "utilisation": ("live tokens in private pages", "share", None),
    "waste_f": ("waste F of private pages", "share", None),
    "cached_share": ("prompt tokens served from cache", "share", None),
    "retractions": ("retractions", "", None),
    "evicted_tokens": ("tokens evicted", "tokens", None),
    "early_evictions": ("looks ahead of the interval, the pool being short", "", None),
    "freed_tokens": ("pages given back early, in tokens", "tokens", None),
    "freed_pages": ("pages given back early (p1: of one token)", "", None),
    "copied_bytes": ("K and V copied", "bytes", None),
    "forks": ("forks of a shared prefix", "", None),
    "predicted_pages_per_fork": ("pages saved per fork, predicted", "pages", None),
    "realised_pages_per_fork": ("pages saved per fork, realised", "pages", None),
    "tokens_per_answer": ("tokens per answer", "tokens", None),
    "recall": ("quality: expected facts in the answers", "share", None),
    "scored_answers": ("answers that were scored", "", None),
    "agreement": ("quality proxy: agreement with the unpruned arm", "share", None),
}
RATIO_FIGURES = tuple(path for path, (_, _, better) in FIGURES.items() if better is not None)


def runs_of(runs: Sequence[Run], arm: str) -> dict[int, Run]:
    """The arm's runs by repeat."""
    return {int(run["repeat"]): run for run in runs if run["arm"] == arm}


def arm_names(runs: Sequence[Run]) -> list[str]:
    """Arms present: known ones in the order of `ARMS`, others after them by name."""
    present = {str(run["arm"]) for run in runs}
    return [name for name in ARMS if name in present] + sorted(present - set(ARMS))


def summarize_arms(runs: Sequence[Run]) -> dict[str, dict[str, dict[str, float]]]:
    """Per arm and figure: median and spread over repeats. A figure without a value is left out."""
    arms: dict[str, dict[str, dict[str, float]]] = {}
    for arm in arm_names(runs):
        arms[arm] = {}
        for path in FIGURES:
            found = [figure_at(run["summary"], path) for run in runs_of(runs, arm).values()]
            values = [value for value in found if value is not None]
            if values:
                arms[arm][path] = spread(values)
    return arms


def paired_ratios(runs: Sequence[Run], arm: str, reference: str, path: str) -> list[float]:
    """arm / reference of one figure, one per repeat that has both, in order of repeats."""
    ours, theirs = runs_of(runs, arm), runs_of(runs, reference)
    ratios = []
    for repeat in sorted(ours.keys() & theirs.keys()):
        above = figure_at(ours[repeat]["summary"], path)
        below = figure_at(theirs[repeat]["summary"], path)
        if above is not None and below:
            ratios.append(above / below)
    return ratios


def compare_arms(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Ratios of every arm to its declared reference, where both are present.

    Returns:
        One entry per arm: `arm`, `reference`, `ratios` (figure -> spread with `repeats`).
    """
    present = arm_names(runs)
    comparisons = []
    for name in present:
        reference = ARMS[name].reference if name in ARMS else None
        if reference is None or reference not in present:
            continue
        ratios = {}
        for path in RATIO_FIGURES:
            values = paired_ratios(runs, name, reference, path)
            if values:
                ratios[path] = {**spread(values), "repeats": len(values)}
        comparisons.append({"arm": name, "reference": reference, "ratios": ratios})
    return comparisons


def check_tokens(runs: Sequence[Run], reference: str) -> list[dict[str, Any]]:
    """Compare generated tokens of every arm with the reference arm's, repeat by repeat.

    An arm that evicts must generate what the arm with the same evictions does
    (`Arm.same_tokens_as`) and is compared with that; where no such arm is declared or present, it
    is left out. A request whose prompt already differs (an earlier answer of its session did) is
    counted in `different` but not in `mismatched`: only equal prompts can show that an arm answers
    wrongly.

    Returns:
        One entry per arm: `reference`, `requests` compared, `different` outputs, `mismatched`
        outputs to equal prompts, `first` mismatch as {repeat, session, turn, index},
        `self_consistent`: whether all repeats of the arm gave the same output hash, and
        `evictions` (see `_evictions`).
    """
    present = arm_names(runs)
    entries = []
    for arm in present:
        known = ARMS.get(arm)
        other = known.same_tokens_as if known is not None and known.prunes else reference
        if other is None and any(a.same_tokens_as == arm for a in ARMS.values()):
            other = arm  # a reference of others: only its own repeats are compared
        if other in present and any(r["output_ids"] for run in runs for r in run["requests"]):
            entries.append(_check_arm(runs, arm, str(other)))
    return entries


def same_evictions(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the entries of `check_tokens`, those of arms that should evict what another does."""
    return [
        entry for entry in entries
        if entry["arm"] in ARMS and ARMS[entry["arm"]].same_tokens_as == entry["reference"]
    ]  # fmt: skip


def _check_arm(runs: Sequence[Run], arm: str, reference: str) -> dict[str, Any]:
    ours, theirs = runs_of(runs, arm), runs_of(runs, reference)
    entry: dict[str, Any] = {
        "arm": arm,
        "reference": reference,
        "requests": 0,
        "different": 0,
        "mismatched": 0,
        "first": None,
        "self_consistent": len({run["summary"]["output_sha256"] for run in ours.values()}) == 1,
        "evictions": _evictions(ours, theirs),
    }
    for repeat in sorted(ours.keys() & theirs.keys()):
        expected = {(r["session"], r["turn"]): r for r in theirs[repeat]["requests"]}
        for request in ours[repeat]["requests"]:
            other = expected.get((request["session"], request["turn"]))
            if other is None:
                continue
            entry["requests"] += 1
            got, want = list(request["output_ids"]), list(other["output_ids"])
            if got == want:
                continue
            entry["different"] += 1
            if request["prompt_hash"] != other["prompt_hash"]:
                continue
            entry["mismatched"] += 1
            if entry["first"] is None:
                entry["first"] = {
                    "repeat": repeat,
                    "session": request["session"],
                    "turn": request["turn"],
                    "index": first_difference(got, want),
                }
    return entry


def _evictions(ours: Mapping[int, Run], theirs: Mapping[int, Run]) -> dict[str, int]:
    """Whether two arms could evict the same tokens, summed over the repeats that both have:
    `evicted` and `reference_evicted`, and `early_evictions` of both, for a policy that is asked
    ahead of the interval, because the pool is short, sees another request than one asked on time. A
    count that no server told is left out."""
    both = ours.keys() & theirs.keys()
    counted = {
        "evicted": [ours[repeat]["summary"].get("evicted_tokens") for repeat in both],
        "reference_evicted": [theirs[repeat]["summary"].get("evicted_tokens") for repeat in both],
        "early_evictions": [
            runs[repeat]["summary"].get("early_evictions")
            for repeat in both
            for runs in (ours, theirs)
        ],
    }
    return {name: sum(values) for name, values in counted.items() if values and None not in values}


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Index of the first position where two sequences differ (their common length if one ends)."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
