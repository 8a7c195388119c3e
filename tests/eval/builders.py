"""Small made-up runs, results and tokenizers for the tests of the evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vtoken_sglang_eval.client import RequestRecord, RunTrace
from vtoken_sglang_eval.compare import check_tokens, compare_arms, summarize_arms
from vtoken_sglang_eval.config import EvalConfig
from vtoken_sglang_eval.metrics import summarize
from vtoken_sglang_eval.pool import PoolSample


class CharacterTokenizer:
    """One token per character; the template marks roles with angle brackets."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token_id) for token_id in token_ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        parts = [f"<{message['role']}>{message['content']}</>" for message in messages]
        return "".join(parts) + "<assistant>"


def record(session: int = 0, turn: int = 0, **changes: Any) -> RequestRecord:
    """A request that took a second: first token after 0.2 s, four more 0.2 s apart."""
    values: dict[str, Any] = {
        "session": session,
        "turn": turn,
        "prompt_hash": f"prompt-{session}-{turn}",
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "sent_s": 0.1,
        "ttft_s": 0.2,
        "latency_s": 1.0,
        "gaps_s": (0.2, 0.2, 0.2, 0.2),
        "output_ids": (1, 2, 3, 4, 5),
    }
    return RequestRecord(**{**values, **changes})


def run_of(
    arm: str, repeat: int, records: Sequence[RequestRecord], duration_s: float = 2.0
) -> dict[str, Any]:
    """A run as `run.run_once` returns it."""
    pool = (
        PoolSample(at_s=0.0, used=64, evictable=0, available=936, running=1),
        PoolSample(at_s=1.0, used=128, evictable=32, available=840, running=2, queued=1),
    )
    trace = RunTrace(records=tuple(records), pool=pool, duration_s=duration_s)
    return {
        "arm": arm,
        "repeat": repeat,
        "command": f"python -m something --arm {arm}",
        "startup_s": 30.0,
        "load_average_before": 0.5,
        "summary": summarize(trace, server_cpu_s=1.5),
        "requests": [asdict(entry) for entry in trace.records],
        "pool": [asdict(sample) for sample in pool],
    }


def result_of(runs: Sequence[dict[str, Any]], repeats: int = 1) -> dict[str, Any]:
    """A result document around the given runs."""
    names = list(dict.fromkeys(run["arm"] for run in runs))
    return {
        "format": "vtoken-sglang-eval/1",
        "command": "vtoken-sglang eval run --repeats 1",
        "started": "2026-01-01T00:00:00+00:00",
        "duration_s": 12.0,
        "runs_planned": len(runs),
        "config": EvalConfig(
            model="tiny", repeats=repeats, device="cpu", dtype="float32"
        ).to_dict(),
        "versions": {"python": "3.11.0", "sglang": "0.5.23", "torch": "2", "vtoken": None},
        "patch_series": None,
        "commit": "0123456789abcdef0123-dirty",
        "machine": {"device": "cpu", "cpu": "A CPU", "cores": 2, "memory_gib": 4.0},
        "model": {"name": "tiny"},
        "dataset": {"name": "talk.json", "sha256": "00", "dropped_chars": 0},
        "workload": {"name": "multi_turn", "requests": len(runs[0]["requests"])},
        "arms": [{"name": name, "summary": f"about {name}", "reference": None} for name in names],
        "summary": summarize_arms(runs),
        "comparisons": compare_arms(runs),
        "tokens": {"reference": names[0], "arms": check_tokens(runs, names[0])},
        "runs": list(runs),
    }


def three_arm_result(repeats: int = 2) -> dict[str, Any]:
    """Stock, native and hook-only; hook-only is 10 % slower than native in every repeat."""
    seconds = {"stock": 4.0, "native": 2.0, "hook-only": 2.2}
    runs = [
        run_of(arm, repeat, [record(0, 0), record(0, 1)], duration_s)
        for repeat in range(repeats)
        for arm, duration_s in seconds.items()
    ]
    return result_of(runs, repeats)
