"""Small made-up runs and tokenizers for the tests of the evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vtoken_sglang_eval.arms import groups_of
from vtoken_sglang_eval.client import RequestRecord, RunTrace
from vtoken_sglang_eval.metrics import summarize
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.sampling import PoolSample


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


def study(
    speed: Mapping[str, Sequence[float]],
    quality: Mapping[str, float] | None = None,
    options: Options | None = None,
    name: str = "chat",
    loads: Sequence[int] = (8,),
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Head and runs of a study in which each arm takes the given seconds for the same ten tokens,
    one entry per repeat.

    Args:
        speed: arm name -> seconds; names are those that `options` gives its arms.
        quality: arm name -> share of right answers; None: not measured.
    """
    options = options or Options(policies=("snapkv",), model="tiny")
    arms = {arm.name: arm for group in groups_of(options) for arm in group.arms}
    runs = []
    for arm, seconds in speed.items():
        for repeat, duration in enumerate(seconds):
            for load in loads:
                pool = (
                    PoolSample(at_s=0.0, used=64, available=936, running=1),
                    PoolSample(at_s=1.0, used=64 * duration, evictable=32, running=2, queued=1),
                )
                records = (record(0, 0), record(0, 1, latency_s=duration))
                trace = RunTrace(records=records, pool=pool, duration_s=duration)
                run = {
                    "kind": "run", **arms[arm].columns(), "load": load, "repeat": repeat,
                    "at": "2026-01-01T00:00:00+00:00", "load_average": 0.1,
                    **summarize(trace, None), "answers": [],
                    "trace": {
                        "requests": [asdict(entry) for entry in records],
                        "pool": [asdict(sample) for sample in pool], "pruned": [],
                    },
                }  # fmt: skip
                if quality is not None:
                    run["quality"] = quality[arm]
                runs.append(run)
    head = {
        "kind": "study", "format": "vtoken-sglang-runs/1", "name": name,
        "command": "vtoken-sglang eval compare", "started": "2026-01-01T00:00:00+00:00",
        "options": options.to_dict(), "arms": [arm.columns() for arm in arms.values()],
        "baseline": "native", "missing": [], "model": {"name": "tiny"},
        "dataset": {"name": "talk.json", "sha256": "00"},
        "workload": {
            "name": "multi_turn", "sessions": 1, "requests": 2, "output_tokens": 10, "longest": 99,
            "facts": {"mean_turns": 2.0}, "fingerprint": "f00",
        },
        "versions": {"python": "3.11"}, "commit": "0123-dirty",
        "machine": {"device": "cpu", "cpu": "A CPU", "cores": 2, "memory_gib": 4.0},
    }  # fmt: skip
    return head, runs
