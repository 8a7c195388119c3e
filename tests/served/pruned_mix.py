"""Requests that are pruned in many ways, and what a server did with them.

Every request is greedy and carries its own options, so one server answers all of them; its arm,
page size, radix cache, chunked prefill and overlap are what the runs differ in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers.masked_reference import Eviction, Trace, read_trace
from tests.helpers.server import PRODUCT, ServerProcess
from tests.helpers.server_log import peak_private_tokens
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS, Configuration
from tests.served.mix import Answer, Case, Mix, run_mix

LONG = "long prompt pruned between chunks"
LONG_BUDGET = 160
UNTOUCHED = "not pruned"

_LETTER = """Dear Anna, the ferry was late again, so we walked along the harbour until the lamps
came on. The old crane is gone; where it stood they are building a market hall with a glass roof.
Peter counted eleven boats, two of them with new masts, and the blue one that your uncle sold last
spring. We ate at the place behind the customs house: soup, bread, smoked eel, and a pear tart that
was better than the one in June. On Thursday the surveyor comes to look at the cellar wall. He
thinks that the damp rises from the well under the yard, not from the roof, and that a drain along
the north side would be enough. It will cost less than we feared. The cat has learned to open the
pantry door, so the butter now lives on the top shelf. If the weather holds we shall pick the
plums on Sunday and send you a box by the morning boat. Bring the green coat when you come, and
the book about the lighthouse keepers; the children ask for it every evening. Yours, Martha. P.S.
The clock in the hall runs again: it wanted only a drop of oil and a new key, number seven.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How a server treats the memory of evicted tokens: which parts are switched off."""

    ablation: str = ""

    def __str__(self) -> str:
        return self.ablation or "reclaim"


@dataclass(frozen=True, slots=True)
class PrunedRun:
    """One server after the mix.

    Fields:
        answers: by case name.
        trace: evictions by case name.
        state: the runtime's counters after the mix.
        long_peak: most tokens in pages privately held at any step of the case `LONG`, from
            SGLang's own check of every step.
        log: everything the server wrote.
    """

    answers: dict[str, Answer]
    trace: Trace
    state: dict[str, Any]
    long_peak: int
    log: str

    def evicted(self, name: str) -> int:
        return sum(len(eviction.evicted) for eviction in self.trace.get(name, ()))


def pruned_case(name: str, prompt: list[int], count: int, **options: Any) -> Case:
    """A case whose request id is its name and whose `options` go to this package."""
    return Case(
        name=name,
        prompt=prompt,
        count=count,
        sampling={"custom_params": {"vtoken": options}},
        fields={"rid": name},
    )


def build_pruned_mix(encode: Callable[[str], list[int]]) -> Mix:
    """Make the mix; no two prompts share a prefix unless their names say so."""
    text = encode(_LETTER)
    assert len(text) > 240, len(text)

    def prompt(start: int, length: int) -> list[int]:
        return ((text[start:] + text[:start]) * 4)[:length]

    never: dict[str, Any] = {"publish": "never"}
    random: dict[str, Any] = {"policy": "random", "keep": 0.4}
    window: dict[str, Any] = {"policy": "streaming_llm", "budget": 96}
    shared = prompt(40, 160)
    alone = [
        pruned_case("random, published", prompt(0, 180), 56, **random, interval=8, seed=1),
        pruned_case("random, private", prompt(11, 150), 56, **random, **never, interval=8, seed=2),
        pruned_case("window, published", prompt(22, 170), 40, **window),
        pruned_case("window, private", prompt(33, 170), 40, **window, **never, interval=4),
        pruned_case("shared prefix, first", shared, 20, policy="none"),
        pruned_case("shared prefix, masked", [*shared, *text[7:30]], 40, **random, shared="mask"),
        pruned_case("shared prefix, skipped", [*shared, *text[9:30]], 40, **random, shared="skip"),
        pruned_case("shared prefix, last", shared, 20, policy="none"),
    ]
    # Where chunks end depends on who else is being prefilled, and with it what a private prompt
    # loses between chunks; published prompts are pruned at lengths of their own.
    together = [
        pruned_case("1 of 5", prompt(51, 150), 48, **random, interval=4, seed=3),
        pruned_case("2 of 5", prompt(62, 90), 48, policy="streaming_llm", keep=0.5),
        pruned_case(f"3 of 5, {UNTOUCHED}", prompt(73, 100), 48, policy="none"),
        pruned_case("4 of 5", prompt(84, 120), 40, **random, seed=4),
        pruned_case("5 of 5", prompt(95, 70), 48, **window, interval=1),
    ]
    return Mix(alone, together, [], [])


def long_text(encode: Callable[[str], list[int]]) -> list[int]:
    """The letter over and over, 1400 tokens or more."""
    return list(encode(_LETTER)) * 6


def long_case(encode: Callable[[str], list[int]]) -> Case:
    """A prompt far beyond its budget, private, so that it can be pruned between chunks."""
    prompt = (encode(_LETTER)[105:] * 9)[:1200]
    options = {"policy": "random", "budget": LONG_BUDGET, "publish": "never", "interval": 32}
    return pruned_case(LONG, prompt, 24, **options)


def serve_pruned_mix(
    configuration: Configuration, arm: Arm, mix: Mix, long: Case, model_path: Path, folder: Path
) -> PrunedRun:
    """Start a server, send the mix and then the long case, end the server."""
    trace, log = folder / "trace.jsonl", folder / "server.log"
    flags = ["--model-path", str(model_path), *POOL_FLAGS, *configuration.flags()]
    # The default of the server prunes nothing in practice; each request says what it wants.
    flags += ["--vtoken-policy", "streaming_llm", "--vtoken-keep", "1.0", "--vtoken-check"]
    flags += ["--vtoken-ablation", arm.ablation, "--vtoken-trace", str(trace)]
    with ServerProcess(flags, log=log, entry=PRODUCT, environment=STRICT_CHECKS) as server:
        answers = run_mix(server, mix)
        before = len(server.log)
        answers |= run_mix(server, Mix([long], [], [], []))
        peak = peak_private_tokens(server.log[before:])
        (state,) = server.get("/server_info").json()["internal_states"]
    return PrunedRun(answers, read_trace(trace), state["vtoken"], peak, log.read_text("utf-8"))


def same_evictions(left: Trace, right: Trace) -> list[str]:
    """Which requests were pruned differently, as lines; empty when none."""
    return [
        f"{name}: {_summary(left.get(name, []))} != {_summary(right.get(name, []))}"
        for name in sorted(left.keys() | right.keys())
        if left.get(name) != right.get(name)
    ]


def _summary(evictions: list[Eviction]) -> str:
    return ", ".join(f"{len(e.evicted)} at {e.logical_len}" for e in evictions) or "none"
