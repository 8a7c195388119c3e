"""The shapes that compatibility rules are written in, and the reader of SGLang's arguments.

A rule says what it looks at, when it applies, why, and what the user can do instead. Rules are
data, so that the same table refuses a server, fills the README and drives the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vtoken_sglang.errors import HookError, UnsupportedModeError


class ArgsView:
    """Read access to a ServerArgs, before and after SGLang has resolved it.

    SGLang never writes a decision into the record: the record keeps what was typed, decisions lie
    beside it. Reading a record's attribute therefore misses every default that SGLang chose.

    Attributes:
        resolved: whether SGLang's resolution has finished on this record.
    """

    def __init__(self, server_args: Any) -> None:
        from sglang.srt.arg_groups.arg_utils import field_names

        self._server_args = server_args
        self._known: frozenset[str] = field_names(type(server_args))
        self.resolved = bool(getattr(server_args, "_resolution_finished", False))

    def typed(self, name: str) -> Any:
        """The value on the command line, else the field's default. HookError if no such field."""
        self._require(name)
        return getattr(self._server_args, name)

    def value(self, name: str) -> Any:
        """The value in effect so far. HookError if no such field."""
        from sglang.srt.arg_groups.overrides import resolution_result

        self._require(name)
        return resolution_result(self._server_args, name)

    def spelled(self, name: str, flag: str) -> str:
        """`flag` with its value in effect, saying so where the user did not ask for it."""
        value = self.value(name)
        chosen = "" if self.typed(name) == value else " (SGLang's choice here)"
        return f"{flag} {value}{chosen}"

    def model_config(self) -> Any | None:
        """SGLang's ModelConfig, read from the model's config.json; None while it is not known."""
        from sglang.srt.arg_groups.overrides import model_config_of

        if not self.resolved or str(self.value("model_path")).lower() in ("none", "dummy"):
            return None
        return model_config_of(self._server_args)

    def _require(self, name: str) -> None:
        if name not in self._known:
            raise HookError(
                f"ServerArgs.{name}",
                "this SGLang has no such argument, so the mode behind it cannot be checked",
                "install the supported SGLang",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How a mode can be asked for on a machine without a GPU. Used by tests only.

    Fields:
        argv: flags to append to a plain command line.
        model: entries to put over a plain Llama config.json.
        environ: environment variables to set.
        also: other rules that this asks for too, once SGLang has resolved it.
        stopped_by_sglang: without our refusal, SGLang itself rejects `argv` on such a machine;
            the refusal then has to come before SGLang resolves its arguments.
    """

    argv: tuple[str, ...] = ()
    model: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    stopped_by_sglang: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """When a rule over server arguments applies.

    Fields:
        fields: names of the ServerArgs fields that are read.
        environ: names in SGLang's `envs` that are read.
        find: returns what to name in the message, as the user types it, or None.
    """

    fields: tuple[str, ...] = ()
    environ: tuple[str, ...] = ()
    find: Callable[[ArgsView], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A mode of the server that is refused.

    Fields:
        name: short unique name.
        flag: the mode as the user asks for it, for the table.
        trigger: when it applies.
        reason: why it is refused; completes "<flag> is not supported: ...".
        remedy: what to do instead.
        asks: ways to ask for it on a machine without a GPU; never empty.
    """

    name: str
    flag: str
    trigger: Trigger
    reason: str
    remedy: str
    asks: tuple[Ask, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRule:
    """A kind of model that is refused.

    Fields:
        name: short unique name.
        kind: the kind in words; named in the message beside `--model-path`.
        find: takes SGLang's ModelConfig, returns what gave it away, or None.
        reason, remedy: as in `Rule`.
        asks: config.json entries that make such a model; never empty.
    """

    name: str
    kind: str
    find: Callable[[Any], str | None]
    reason: str
    remedy: str
    asks: tuple[Ask, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """A mode that looks close to a refused one and is let through on purpose."""

    flag: str
    why: str
    asks: tuple[Ask, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
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


def required(holder: Any, name: str) -> Any:
    """`holder.name`. HookError when SGLang no longer has it: a check must not pass unseen."""
    try:
        return getattr(holder, name)
    except AttributeError:
        raise HookError(
            f"{type(holder).__name__}.{name}",
            "this SGLang has no such attribute, so the mode behind it cannot be checked",
            "install the supported SGLang",
        ) from None
