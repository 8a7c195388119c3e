"""Questions about what stands somewhere in a text of 1k to 4k tokens, lead words of answers apart.

Several kinds, from one fact in unrelated sentences to a text of nothing but facts. A lead ("The
access code of the amber lantern is") says how the answer begins; it is not part of the prompt, so
whatever a policy keeps was chosen without it. All follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from vtoken_sglang_eval.chat import ChatTokenizer, Message

from .tasks import COLOURS, FACTS, MARK, NAMES, NUMBERED, THINGS, Source, Task, split_prompt
from .text import filler

SURNAMES = ("Abbott", "Becker", "Castle", "Duarte", "Ekman", "Fontaine", "Grant", "Holm", "Ivanov")
TOWNS = ("Porto", "Lyon", "Bergen", "Krakow", "Ghent", "Turin", "Malaga", "Leeds", "Basel", "Graz")
TRADES = ("baker", "pilot", "dentist", "tailor", "farmer", "lawyer", "painter", "plumber", "nurse")
PETS = ("cat", "parrot", "rabbit", "horse", "turtle", "dog", "goat", "snake", "canary")
ANSWER_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of a text: what is asked, how the answer begins, what it must hold."""

    name: str
    question: str
    lead: str
    answers: tuple[str, ...]


Made = tuple[list[Message], list[Asked]]
"""Turns before the question (the last one may be the user's, then the question follows in it)."""
Maker = Callable[[Random, Iterator[str], ChatTokenizer, int], Made]


def _code(random: Random) -> str:
    return str(random.randrange(10000, 100000))


def _scatter(
    random: Random,
    told: Sequence[str],
    source: Iterator[str],
    tokenizer: ChatTokenizer,
    length: int,
) -> str:
    """Statements among unrelated sentences, `length` tokens of these, in the order given."""
    texts, _ = filler(source, tokenizer, length)
    places = sorted(random.sample(range(1, len(texts)), len(told)), reverse=True)
    for place, statement in zip(places, reversed(told), strict=True):
        texts.insert(place, statement)
    return " ".join(texts)


def _notes(text: str) -> list[Message]:
    return [{"role": "user", "content": f"Read these notes. I will ask about them.\n\n{text}"}]


def keys(random: Random, source: Iterator[str], tokenizer: ChatTokenizer, length: int) -> Made:
    """Six things with a code each."""
    things = [
        f"{colour} {thing}"
        for colour, thing in zip(random.sample(COLOURS, 6), random.sample(THINGS, 6), strict=True)
    ]
    codes = {thing: _code(random) for thing in things}
    told = [f"The access code of the {thing} is {code}." for thing, code in codes.items()]
    asked = [
        Asked(thing, f"What is the access code of the {thing}?",
              f"The access code of the {thing} is", (code,))
        for thing, code in list(codes.items())[:4]
    ]  # fmt: skip
    return _notes(_scatter(random, told, source, tokenizer, length)), asked


def needle(random: Random, source: Iterator[str], tokenizer: ChatTokenizer, length: int) -> Made:
    """One thing with a code."""
    thing, code = f"{random.choice(COLOURS)} {random.choice(THINGS)}", _code(random)
    text = _scatter(
        random, [f"The access code of the {thing} is {code}."], source, tokenizer, length
    )
    question = f"What is the access code of the {thing}?"
    return _notes(text), [Asked("code", question, f"The access code of the {thing} is", (code,))]


def values(random: Random, source: Iterator[str], tokenizer: ChatTokenizer, length: int) -> Made:
    """One thing with two codes, stated apart."""
    thing = f"{random.choice(COLOURS)} {random.choice(THINGS)}"
    first, second = _code(random), _code(random)
    told = [
        f"The first access code of the {thing} is {first}.",
        f"The second access code of the {thing} is {second}.",
    ]
    asked = [
        Asked(which, f"What is the {which} access code of the {thing}?",
              f"The {which} access code of the {thing} is", (code,))
        for which, code in (("first", first), ("second", second))
    ]  # fmt: skip
    return _notes(_scatter(random, told, source, tokenizer, length)), asked


def tracking(random: Random, source: Iterator[str], tokenizer: ChatTokenizer, length: int) -> Made:
    """A number that is put into one box and then, in another place, into a second one."""
    boxes = random.sample(COLOURS, 4)
    codes = [_code(random) for _ in range(2)]
    told = [
        f"Number {codes[0]} was put into the {boxes[0]} box.",
        f"Number {codes[1]} was put into the {boxes[1]} box.",
        f"The number of the {boxes[0]} box was then put into the {boxes[2]} box, too.",
        f"The number of the {boxes[1]} box was then put into the {boxes[3]} box, too.",
    ]
    asked = [
        Asked(box, f"Which number is in the {box} box?", f"In the {box} box is number", (code,))
        for box, code in zip(boxes[2:], codes, strict=True)
    ]
    return _notes(_scatter(random, told, source, tokenizer, length)), asked


def turns(random: Random, source: Iterator[str], tokenizer: ChatTokenizer, length: int) -> Made:
    """Four facts told in turn 1, `length` tokens of other matters in turn 2."""
    names = iter(random.sample(NAMES, len(FACTS)))
    told = {
        name: str(random.randrange(1000, 10000)) if name in NUMBERED else next(names)
        for name, *_ in FACTS
    }
    texts, _ = filler(source, tokenizer, length)
    half = len(texts) // 2
    introduction = " ".join(statement.format(told[name]) for name, statement, *_ in FACTS)
    history: list[Message] = [
        {"role": "user", "content": f"Hello! {introduction} Please remember all of this."},
        {"role": "assistant", "content": "Nice to meet you. I will remember it."},
        {"role": "user", "content": " ".join(texts[:half])},
        {"role": "assistant", "content": " ".join(texts[half:])},
        {"role": "user", "content": "Thank you."},
    ]
    asked = [Asked(name, question, lead, (told[name],)) for name, _, question, lead in FACTS]
    return history, asked


def _people(random: Random) -> Iterator[str]:
    pairs = [f"{name} {surname}" for name in NAMES for surname in SURNAMES]
    random.shuffle(pairs)
    return iter(pairs)


def _dense(
    statements: Iterator[tuple[str, list[Asked]]],
    random: Random,
    tokenizer: ChatTokenizer,
    length: int,
) -> Made:
    """A text of nothing but statements, and one question about each of four of them."""
    texts: list[str] = []
    questions: list[list[Asked]] = []
    total = 0
    for text, asked in statements:
        total += len(tokenizer.encode(" " + text))
        if total > length:
            break
        texts.append(text)
        questions.append(asked)
    return _notes(" ".join(texts)), [random.choice(each) for each in random.sample(questions, 4)]


def biographies(
    random: Random, source: Iterator[str], tokenizer: ChatTokenizer, length: int
) -> Made:
    """Lives of as many people as fit."""

    def lives() -> Iterator[tuple[str, list[Asked]]]:
        for person in _people(random):
            town, trade, pet = (random.choice(group) for group in (TOWNS, TRADES, PETS))
            year, saved = random.randrange(1900, 2000), random.randrange(100, 1000)
            text = (
                f"{person} was born in {town} in {year}, works as a {trade}, keeps a {pet} and "
                f"has saved {saved} dollars."
            )
            yield text, [
                Asked(f"{person} year", f"In which year was {person} born?",
                      f"{person} was born in the year", (str(year),)),
                Asked(f"{person} town", f"Where was {person} born?",
                      f"{person} was born in", (town,)),
                Asked(f"{person} saved", f"How many dollars has {person} saved?",
                      f"{person} has saved", (str(saved),)),
            ]  # fmt: skip

    return _dense(lives(), random, tokenizer, length)


def records(random: Random, source: Iterator[str], tokenizer: ChatTokenizer, length: int) -> Made:
    """Orders, one after the other, as many as fit."""

    def orders() -> Iterator[tuple[str, list[Asked]]]:
        for number in random.sample(range(1000, 10000), 400):
            count, shelf = random.randrange(10, 100), random.randrange(100, 1000)
            name = random.choice(NAMES)
            text = f"Order {number}: {count} pieces for {name}, shelf {shelf}."
            yield text, [
                Asked(f"{number} shelf", f"On which shelf is order {number}?",
                      f"Order {number} is on shelf", (str(shelf),)),
                Asked(f"{number} name", f"For whom is order {number}?",
                      f"Order {number} is for", (name,)),
            ]  # fmt: skip

    return _dense(orders(), random, tokenizer, length)


KINDS: dict[str, Maker] = {
    "needle": needle,
    "keys": keys,
    "values": values,
    "tracking": tracking,
    "turns": turns,
    "biographies": biographies,
    "records": records,
}


def lookups(
    tokenizer: ChatTokenizer,
    source: Source,
    lengths: Sequence[int],
    rounds: int,
    seed: int,
    kinds: Sequence[str] = tuple(KINDS),
) -> list[Task]:
    """Questions of every kind at every length, round by round, so that a beginning of the list is
    a smaller measurement of the same.

    Args:
        source: sentences for the text around. lengths: tokens of the text.
    """
    tasks: list[Task] = []
    for number in range(rounds):
        for length in lengths:
            for kind in kinds:
                key = f"{kind} {seed} {number} {length}"
                random = Random(key)
                history, questions = KINDS[kind](random, source(key), tokenizer, length)
                tasks += [
                    _task(tokenizer, kind, f"{length}_{number}_{one.name}", history, one, length)
                    for one in questions
                ]
    return tasks


def _task(
    tokenizer: ChatTokenizer,
    kind: str,
    name: str,
    history: Sequence[Message],
    one: Asked,
    length: int,
) -> Task:
    *before, last = history
    content = f"{last['content']}\n\n{MARK}{one.question}"
    context, question = split_prompt(tokenizer, [*before, {**last, "content": content}], "")
    return Task(
        kind=kind,
        name=name,
        context=context,
        question=question,
        answers=one.answers,
        answer_tokens=ANSWER_TOKENS,
        facts={"length": length},
        lead=one.lead,
    )
