"""Many requests over one long prefix, and what a server did with them under one strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.server import ServerProcess
from tests.served.mix import Answer

TEXT = """The orchard lies between the road and the stream, and every tree in it has a number. In
March the gardener walks the rows with a ladder and a saw, takes out what the frost has split, and
paints the wounds. Bees come from the neighbour's eleven hives; without them there would be leaves
and nothing else. By June the small fruit must be thinned, two to a cluster, since a branch that
carries all it set will break in the first storm. Picking starts with the yellow plums on the slope
and ends with the hard green apples that keep until Easter. Each crate gets a slip with the number
of the tree, the day and the name of the picker, and the slips are copied into a ledger at night.
Nobody remembers who began the ledger. The oldest page that can be read is about a late frost and
a ladder that was lent to the miller and came back with a rung missing. There are years with one
line only. In the wet year the stream took the lower fence and four trees, and the page shows a map
of where they stood. The cider press is shared by three farms; whoever has pressed last cleans it,
and whoever finds it dirty writes that down too. Visitors ask which apple is the best. The answer
depends on the month, on the cellar and on whether one wants to eat it, to bake it or to wait.
"""

PREFIX, SHARERS, COUNT = 328, 5, 40
JUNK_PROMPTS, JUNK_LENGTH = 4, 420
UNPRUNED = {"policy": "none"}
LONE = ("window", "budget", "chunked", "chunked, private")


@dataclass(frozen=True, slots=True)
class SharingPrompts:
    """Prompts as token ids.

    Fields:
        prefix: what all share; at P=16 its last page is half full.
        sharers: the prefix and a tail of each one's own.
        probe: the prefix and a question; never pruned.
        chunked: the prefix and a tail of several chunks.
        junk: unrelated; each fills part of the pool.
    """

    prefix: list[int]
    sharers: list[list[int]]
    probe: list[int]
    chunked: list[int]
    junk: list[list[int]]


@dataclass(frozen=True, slots=True)
class Round:
    """What one strategy did.

    Fields:
        together: answers of the sharers. neighbour: of an unpruned request among them.
        several: three answers to one request. lone: of requests alone on the server, by name.
        before, after: the unpruned probe alone: twice over a fresh cache, and again at the end.
        state: the runtime's counters at the end. forks: those of this round.
    """

    together: list[Answer] = field(default_factory=list)
    neighbour: list[Answer] = field(default_factory=list)
    several: list[Answer] = field(default_factory=list)
    lone: dict[str, Answer] = field(default_factory=dict)
    before: list[Answer] = field(default_factory=list)
    after: list[Answer] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    forks: list[dict[str, Any]] = field(default_factory=list)


def sharing_prompts(text: Sequence[int]) -> SharingPrompts:
    """Cut prompts out of a text of at least 300 tokens."""
    assert len(text) >= 300, len(text)
    many = [*text] * 8

    def part(start: int, length: int) -> list[int]:
        return many[start : start + length]

    prefix = part(0, PREFIX)
    return SharingPrompts(
        prefix=prefix,
        sharers=[[*prefix, *part(61 * i + 17, 9 + 14 * i)] for i in range(SHARERS)],
        probe=[*prefix, *part(205, 12)],
        chunked=[*prefix, *part(101, 180)],
        junk=[part(23 * (i + 1), JUNK_LENGTH) for i in range(JUNK_PROMPTS)],
    )


def payload(prompt: list[int], count: int, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **more}
    sampling["custom_params"] = {"vtoken": options}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}


def run_round(server: ServerProcess, prompts: SharingPrompts, strategy: str) -> Round:
    """Probe, crowd, probe, lone requests, probe. The pool is full of junk when the crowd comes, so
    that the tree must evict. `skip` has no lone requests: nothing to compare them with."""
    done = Round()
    flush(server)
    fill(server, prompts)
    done.before.extend(probe(server, prompts) for _ in range(2))
    known = state_of(server)["forks"]["committed"]
    done.together.extend(crowd(server, prompts, strategy, done))
    done.after.append(probe(server, prompts))
    flush(server)  # what the crowd left in the cache is not the same under every strategy
    server.generate(payload(prompts.prefix, 1, UNPRUNED))
    for name, body in _lone(prompts, strategy).items() if strategy != "skip" else ():
        done.lone[name] = answer_of(server.generate(body))
    done.after.append(probe(server, prompts))
    done.state.update(state_of(server))
    new = done.state["forks"]["committed"] - known
    done.forks.extend(done.state["forks"]["log"][-new:] if new else [])
    return done


def crowd(
    server: ServerProcess, prompts: SharingPrompts, strategy: str, done: Round
) -> list[Answer]:
    """All sharers, an unpruned neighbour and one request for three answers, at once."""
    options: list[dict[str, Any]] = [
        {"policy": "random", "keep": 0.3, "seed": 1},
        {"policy": "random", "keep": 0.3, "seed": 2},
        {"policy": "random", "keep": 0.5, "seed": 3},
        {"policy": "streaming_llm", "keep": 0.4},
        {"policy": "streaming_llm", "keep": 0.4},
    ]
    bodies = [
        payload(prompt, COUNT + 4 * at, {**own, "shared": strategy, "interval": 8})
        for at, (prompt, own) in enumerate(zip(prompts.sharers, options, strict=True))
    ]
    for at, body in enumerate(bodies):
        body["rid"] = f"{strategy} {at}"
    bodies.append(payload(prompts.probe, COUNT, UNPRUNED))
    cow = {"policy": "random", "keep": 0.4, "seed": 9, "shared": strategy}
    bodies.append(payload([*prompts.prefix, *prompts.probe[-9:]], 24, cow, n=3))
    *alone, neighbour, several = server.generate_concurrently(bodies)
    done.neighbour.append(answer_of(neighbour))
    done.several.extend(map(answer_of, several))
    return [answer_of(raw) for raw in alone]


def _lone(prompts: SharingPrompts, strategy: str) -> dict[str, dict[str, Any]]:
    window = {"policy": "streaming_llm", "keep": 0.3, "shared": strategy, "interval": 4}
    budget = {"policy": "random", "budget": 96, "seed": 4, "shared": strategy, "interval": 4}
    bodies = {
        "window": payload(prompts.sharers[1], 28, window),
        "budget": payload(prompts.sharers[2], 28, budget),
        "chunked": payload(prompts.chunked, 16, budget),
        "chunked, private": payload(prompts.chunked, 16, {**budget, "publish": "never"}),
    }
    for name, body in bodies.items():
        body["rid"] = f"{strategy} {name}"
    return bodies


def fill(server: ServerProcess, prompts: SharingPrompts) -> None:
    """Cache junk, then the prefix, so that the junk is evicted first."""
    for junk in prompts.junk:
        server.generate(payload(junk, 1, UNPRUNED))
    server.generate(payload(prompts.prefix, 1, UNPRUNED))


def probe(server: ServerProcess, prompts: SharingPrompts) -> Answer:
    """An unpruned request over the prefix, alone on the server."""
    return answer_of(server.generate(payload(prompts.probe, 12, UNPRUNED)))


def flush(server: ServerProcess) -> None:
    answer = server.post("/flush_cache", {})
    assert answer.status_code == 200, answer.text


def state_of(server: ServerProcess) -> dict[str, Any]:
    """The runtime's counters."""
    (state,) = server.get("/server_info").json()["internal_states"]
    found: dict[str, Any] = state["vtoken"]
    return found


def answer_of(raw: Any) -> Answer:
    """An answer of /generate as the other served tests have it."""
    meta = raw["meta_info"]
    return Answer(
        tokens=list(raw["output_ids"]),
        logprobs=[float(entry[0]) for entry in meta["output_token_logprobs"]],
        text=raw["text"],
        finish=meta["finish_reason"]["type"],
        cached=meta["cached_tokens"],
        input_logprobs=[],
    )


def storm(server: ServerProcess, prompts: SharingPrompts) -> None:
    """More than fits beside the cache: evictions, and forks of every strategy at once."""
    bodies = []
    for at in range(10):
        options = {
            "policy": ("random", "streaming_llm")[at % 2],
            "keep": (0.3, 0.6)[at // 2 % 2],
            "shared": ("cow", "auto", "mask", "skip")[at % 4],
            "seed": at,
            "interval": 4,
        }
        tail = prompts.junk[at % len(prompts.junk)][at * 3 : at * 3 + 60 + 12 * at]
        bodies.append(payload([*prompts.prefix, *tail], 50 + 8 * at, options))
    for raw in server.generate_concurrently(bodies):
        assert raw["meta_info"]["finish_reason"]["type"] == "length"
