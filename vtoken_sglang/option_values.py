"""What an option may hold: each kind reads a flag's text, checks a value of any origin, and says
its rule in words. Only `read` takes text for a number."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from vtoken_sglang.errors import ConfigError

Label = Callable[[str], str]

MAX_TOKENS: Final = 2**31 - 1
MAX_ARGUMENTS: Final = 64
NO_ARGUMENTS: Final = "{}"


class Kind(ABC):
    """A kind of value. Fields: choices: the strings allowed, empty when any is; metavar: what
    stands for the value in the help text, empty for a flag without one."""

    choices: tuple[str, ...] = ()
    metavar = "TEXT"

    @abstractmethod
    def check(self, field: str, value: object) -> Any:
        """`value` in the option's own type. Raises ConfigError, which names `field`."""

    def read(self, field: str, text: str) -> Any:
        """The value of a flag's text. Raises ConfigError."""
        return self.check(field, text)


@dataclass(frozen=True, kw_only=True)
class Number(Kind):
    """An int; an int or a float where `type` is float; never a bool.

    Fields:
        minimum, maximum: inclusive bounds; `above` is an exclusive lower one. NaN and the
            infinities break them, since there is always a `maximum`.
        share: whether a float between 0 and 1, both excluded, may stand for the int.
    """

    type: type[int] | type[float] = int
    minimum: float | None = None
    above: float | None = None
    maximum: float = MAX_TOKENS
    share: bool = False
    metavar = "N"

    def read(self, field: str, text: str) -> int | float:
        return self.check(field, _number(text))

    def check(self, field: str, value: object) -> int | float:
        if self.share and isinstance(value, float) and 0.0 < value < 1.0:
            return value
        if isinstance(value, bool) or not isinstance(value, int | self.type):
            share = ", or a share above 0.0 and below 1.0" if self.share else ""
            raise ConfigError(field, f"must be of type {self.type.__name__}{share}", value)
        bounds = []
        if self.above is not None:
            bounds.append((value > self.above, f"above {self.above}"))
        if self.minimum is not None:
            bounds.append((value >= self.minimum, f"at least {self.minimum}"))
        bounds.append((value <= self.maximum, f"at most {self.maximum}"))
        if not all(good for good, _ in bounds):
            raise ConfigError(field, "must be " + " and ".join(rule for _, rule in bounds), value)
        return self.type(value)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True, kw_only=True)
class Text(Kind):
    """A string. Fields:
    choices: what it may be; with `several`, any of them, each once, with commas between.
    pattern, rule: regular expression it must match as a whole, and its rule in words.
    """

    choices: tuple[str, ...] = ()
    several: bool = False
    pattern: str = "(?s:.+)"
    rule: str = "must not be empty"

    def check(self, field: str, value: object) -> str:
        if not isinstance(value, str):
            raise ConfigError(field, "must be of type str", value)
        if not self.choices:
            if not re.fullmatch(self.pattern, value):
                raise ConfigError(field, self.rule, value)
            return value
        names = [value] if not self.several else value.split(",") if value else []
        if len(set(names)) != len(names) or not set(names) <= set(self.choices):
            which = "names with commas between, each once, of" if self.several else "one of"
            raise ConfigError(field, f"must be {which} {', '.join(self.choices)}", value)
        return value


class Switch(Kind):
    """On or off."""

    metavar = ""

    def check(self, field: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise ConfigError(field, "must be of type bool", value)
        return value


class Arguments(Kind):
    """Named numbers, strings, booleans and nulls: a dict, or the text of a JSON object.

    Held as JSON text with sorted names: hashable, and it tells 1, 1.0 and true apart.
    """

    metavar = "JSON"

    def check(self, field: str, value: object) -> str:
        try:
            given = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict) or len(given) > MAX_ARGUMENTS:
            rule = f"must be a JSON object of at most {MAX_ARGUMENTS} arguments"
            raise ConfigError(field, rule, value)
        for name, argument in given.items():
            if not isinstance(name, str) or not isinstance(argument, int | float | str | None):
                rule = "must be a number, a string, a boolean or null"
                raise ConfigError(f"{field}.{name}", rule, argument)
        try:
            return json.dumps(given, sort_keys=True, allow_nan=False)
        except ValueError:  # NaN, an infinity, an int of too many digits
            raise ConfigError(field, "must hold finite numbers", value) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option.

    Fields:
        name: field name; a request spells it `vtoken.<name>`.
        default: value when not given; where it is None, None is allowed.
        per_request: whether a request may override it.
        listed: whether the help text shows it.
    """

    name: str
    kind: Kind
    help: str
    default: Any
    per_request: bool
    listed: bool

    @property
    def flag(self) -> str:
        return flag_label(self.name)

    @property
    def destination(self) -> str:
        """Attribute of an `argparse.Namespace`."""
        return "vtoken_" + self.name

    def check(self, value: object, label: Label) -> Any:
        """`value` in the option's own type. Raises ConfigError."""
        if value is None and self.default is None:
            return None
        return self.kind.check(label(self.name), value)


def flag_label(name: str) -> str:
    """`repack_threshold` -> `--vtoken-repack-threshold`."""
    return "--vtoken-" + name.replace("_", "-")


def request_label(name: str) -> str:
    """`keep` -> `vtoken.keep`, as typed inside `custom_params`."""
    return "vtoken." + name
