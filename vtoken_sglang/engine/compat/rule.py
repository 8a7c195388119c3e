"""The shape of a refusal, and the reader of SGLang's arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vtoken_sglang.errors import HookError, UnsupportedModeError, shortened

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs


Condition = Callable[[Any], str | None]
"""Looks at SGLang's arguments (`ArgsView`), ModelConfig or a layer; returns what to name in the
message, or None where it does not apply."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Something that is refused. `reason` completes "... is not supported: "."""

    name: str
    when: Condition
    reason: str
    remedy: str = "drop the flag"

    def hit(self, subject: Any, spell: Callable[[str], str] = str) -> Hit | None:
        """The refusal of `subject`; `spell` puts what was found as the user asked for it."""
        found = self.when(subject)
        return None if found is None else Hit(self.name, spell(found), self.reason, self.remedy)


class Hit(NamedTuple):
    """One refusal: which rule, and its three parts with values filled in."""

    rule: str
    flag: str
    reason: str
    remedy: str


class UnsupportedModesError(UnsupportedModeError):
    """One or more refused modes; the message has one line for each, the first comes first.

    Attributes:
        hits: every refusal; `flag`, `reason` and `remedy` are those of the first.
    """

    def __init__(self, hits: tuple[Hit, ...]) -> None:
        self.hits = hits
        super().__init__(hits[0].flag, hits[0].reason, hits[0].remedy)
        lines = (str(UnsupportedModeError(h.flag, h.reason, h.remedy)) for h in hits)
        self.args = ("\n".join(lines),)


def refuse(hits: tuple[Hit, ...]) -> None:
    """Raise UnsupportedModesError if there are any."""
    if hits:
        raise UnsupportedModesError(hits)


class ArgsView:
    """Read access to a ServerArgs, before and after SGLang has resolved it.

    SGLang never writes a decision into the record: the record keeps what was typed, decisions lie
    beside it. Reading a record's attribute therefore misses every default that SGLang chose.

    Attributes:
        resolved: whether SGLang's resolution has finished on this record.
    """

    def __init__(self, server_args: ServerArgs) -> None:
        from sglang.srt.arg_groups.arg_utils import field_names

        self._server_args = server_args
        self._known: frozenset[str] = field_names(type(server_args))
        self.resolved = bool(getattr(server_args, "_resolution_finished", False))

    def value(self, name: str) -> Any:
        """The value in effect so far. HookError if SGLang has no such argument."""
        from sglang.srt.arg_groups.overrides import resolution_result

        if name not in self._known:
            raise missing(f"ServerArgs.{name}")
        return resolution_result(self._server_args, name)

    def spelled(self, name: str) -> str:
        """The flag with its value in effect, saying so where the user did not ask for it."""
        value = self.value(name)
        chosen = "" if getattr(self._server_args, name) == value else " (SGLang's choice here)"
        return f"{flag_of(name)} {shortened(str(value))}{chosen}"

    def model_config(self) -> ModelConfig | None:
        """SGLang's ModelConfig, read from the model's config.json; None while it is not known."""
        from sglang.srt.arg_groups.overrides import model_config_of

        if not self.resolved or str(self.value("model_path")).lower() in ("none", "dummy"):
            return None
        return model_config_of(self._server_args)


def flag_of(field: str) -> str:
    """`tp_size` -> `--tp-size`."""
    return "--" + field.replace("_", "-")


def missing(name: str) -> HookError:
    problem = "this SGLang has no such attribute, so the mode behind it cannot be checked"
    return HookError(name, problem, "install the supported SGLang")


def required(holder: Any, name: str) -> Any:
    """`holder.name`. HookError when SGLang no longer has it: a check must not pass unseen."""
    try:
        return getattr(holder, name)
    except AttributeError:
        raise missing(f"{type(holder).__name__}.{name}") from None
