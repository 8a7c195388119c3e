"""The requests that every served configuration must answer alike, and what came back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.helpers.server import ServerProcess

TOKENS = 24

_NOTES = """The reading room opens at nine and closes at six, except on Fridays, when the building
stays open for the evening lecture. Visitors leave bags in the lockers near the stairs and carry
only paper, pencils and one machine. Maps are fetched from the stacks twice an hour. A slip names
the shelf, the case and the sheet; the person on duty signs it, and the sheet goes back the same
way it came. Anything older than two hundred years is shown on a cradle, under glass, with the
lamp turned low. Photographs are allowed without flash. Copies of whole volumes are not made, but
single sheets can be scanned at the desk by the door, and a scan takes about ten minutes. The
catalogue lists the sheets by region, by surveyor and by year. Three regions were never printed:
the northern coast, the salt flats, and the valley east of the river, where the survey stopped in
the year of the flood. Their drafts are kept in flat boxes on the lowest shelf, wrapped in cloth.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request of the mix.

    Fields:
        name: unique in the mix; the key of its answers.
        prompt: token ids.
        count: tokens to generate.
        sampling: further sampling parameters; greedy unless they say otherwise.
        fields: further request fields.
        exact: the answer must equal transformers' greedy continuation (not so for constrained
            decoding, which transformers does not do).
    """

    name: str
    prompt: list[int]
    count: int = TOKENS
    sampling: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    exact: bool = True

    def payload(self) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": self.count, "ignore_eos": True}
        return {
            "input_ids": self.prompt,
            "sampling_params": {**sampling, **self.sampling},
            "return_logprob": True,
            **self.fields,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What a served engine said.

    Fields:
        tokens: generated ids.
        logprobs: natural-log probability of each.
        text: detokenized.
        finish: "length" or "stop".
        cached: prompt tokens that came from the prefix cache.
        input_logprobs: of prompt tokens 1.., when they were asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    text: str
    finish: str
    cached: int
    input_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Mix:
    """The cases by the way they are sent: one by one, all at once, streamed, n answers each."""

    alone: list[Case]
    together: list[Case]
    streamed: list[Case]
    several: list[Case]

    def cases(self) -> list[Case]:
        return [*self.alone, *self.together, *self.streamed, *self.several]


def build_mix(encode: Callable[[str], list[int]], chat: Callable[[str], list[int]]) -> Mix:
    """Make the mix. `encode` turns text into ids, `chat` a user's message into a whole prompt."""
    notes = encode(_NOTES + _NOTES)
    assert len(notes) >= 420, len(notes)
    shared = notes[110:310]  # starts unlike every prompt before it, so only its own kin share it
    first = [*shared, *encode(" Question: when does the lecture take place? Answer:")]
    second = [*shared, *encode(" Question: which regions were never printed? Answer:")]
    score = {"logprob_start_len": 0}
    alone = [
        Case(name="one token", prompt=notes[:1]),
        Case(name="short", prompt=encode("The capital of France is")),
        Case(name="long", prompt=notes[:300]),
        Case(name="scored prompt", prompt=notes[100:180], fields=score),
        Case(name="prefix, first", prompt=first),
        Case(name="prefix, second", prompt=second),
        Case(name="prefix, first again", prompt=first),
        Case(name="whole prompt cached", prompt=notes[:300]),
        Case(
            name="ends by itself",
            prompt=chat("Answer with one word: what colour is snow?"),
            count=64,
            sampling={"ignore_eos": False},
        ),
        Case(
            name="regex",
            prompt=encode("The first four digits of pi are"),
            sampling={"regex": r" [0-9]\.[0-9]{3} [a-z]{3,8}\.", "ignore_eos": False},
            exact=False,
        ),
        Case(
            name="json",
            prompt=chat("Describe Paris as JSON with its name and its population."),
            count=40,
            sampling={"json_schema": _CITY_SCHEMA, "ignore_eos": False},
            exact=False,
        ),
    ]
    lengths = [(1, 16), (15, 33), (16, 1), (17, 24), (63, 18), (64, 40), (65, 7), (130, 24)]
    together = [
        Case(name=f"together, {length} tokens", prompt=notes[at : at + length], count=count)
        for at, (length, count) in enumerate(lengths)
    ]
    streamed = [Case(name="streamed", prompt=notes[50:90])]
    several = [Case(name="three answers", prompt=notes[20:60], sampling={"n": 3})]
    return Mix(alone, together, streamed, several)


def run_mix(server: ServerProcess, mix: Mix) -> dict[str, Answer]:
    """Send the whole mix; return the answers by case name (`name #i` where there are several)."""
    answers = {case.name: _answer(server.generate(case.payload())) for case in mix.alone}
    batch = server.generate_concurrently([case.payload() for case in mix.together])
    answers |= {case.name: _answer(raw) for case, raw in zip(mix.together, batch, strict=True)}
    for case in mix.streamed:
        events = list(server.stream(case.payload()))
        assert len(events) > 1, f"{case.name}: came in {len(events)} event(s)"
        for earlier, later in zip(events, events[1:], strict=False):
            assert later["text"].startswith(earlier["text"]), f"{case.name}: text was taken back"
        answers[case.name] = _answer(events[-1])
    for case in mix.several:
        for index, raw in enumerate(server.generate(case.payload())):
            answers[f"{case.name} #{index}"] = _answer(raw)
    return answers


def expected_names(case: Case) -> Sequence[str]:
    """The keys under which `run_mix` returns the answers to a case."""
    count = case.sampling.get("n", 1)
    return [case.name] if count == 1 else [f"{case.name} #{index}" for index in range(count)]


def _answer(raw: Any) -> Answer:
    meta = raw["meta_info"]
    pairs = meta["output_token_logprobs"]
    return Answer(
        tokens=[int(token) for token in raw["output_ids"]],
        logprobs=[float(logprob) for logprob, _, _ in pairs],
        text=raw["text"],
        finish=meta["finish_reason"]["type"],
        cached=int(meta["cached_tokens"]),
        input_logprobs=[
            float(pair[0]) for pair in meta.get("input_token_logprobs") or [] if pair[0] is not None
        ],
    )


_CITY_SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
"population": {"type": "integer", "minimum": 0, "maximum": 99999999}},
"required": ["name", "population"], "additionalProperties": false}"""
