"""The one frozen configuration, and what a request may override of it.

It is built once, from flags (`from_namespace`, `split_arguments`), and travels to SGLang's other
processes as JSON in a single environment variable, read only by `from_environment`. Deeper code
is handed the object. An unknown or invalid value is an error, never a default.
Standard library only: neither torch nor sglang may be imported from here.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from vtoken_sglang.errors import ConfigError
from vtoken_sglang.option_specs import (
    ARMS_WITHOUT_PRUNING,
    SPECS,
    FlagSpec,
    Label,
    Value,
    check_value,
    flag_label,
    parse_text,
    request_label,
)
from vtoken_sglang.policy.names import NO_POLICY

ENVIRONMENT_VARIABLE: Final = "VTOKEN_SGLANG_CONFIG"


def _default(name: str) -> Any:
    return SPECS[name].default


@dataclass(frozen=True, slots=True, kw_only=True)
class VTokenConfig:
    """All settings of one server. Meanings, ranges and defaults: `config_fields.SPECS`.

    Raises:
        ConfigError: a value has the wrong type, breaks its range, or contradicts another field.
            The field is named as its flag.
    """

    policy: str = _default("policy")
    arm: str = _default("arm")
    budget: int | None = _default("budget")
    keep: float | None = _default("keep")
    sink: int = _default("sink")
    recent: int = _default("recent")
    interval: int = _default("interval")
    seed: int = _default("seed")
    reuse_prefix_scores: str = _default("reuse_prefix_scores")
    observe_layers: str = _default("observe_layers")
    observe_every: int = _default("observe_every")
    shared: str = _default("shared")
    publish: str = _default("publish")
    admission: str = _default("admission")
    shortage: str = _default("shortage")
    copy: str = _default("copy")
    repack_threshold: float = _default("repack_threshold")
    page_mode: str = _default("page_mode")
    check: bool = _default("check")
    trace: str | None = _default("trace")

    def __post_init__(self) -> None:
        if self.arm == "":
            derived = "hook-only" if self.policy == NO_POLICY else "reclaim"
            object.__setattr__(self, "arm", derived)
        for name, spec in SPECS.items():
            object.__setattr__(self, name, check_value(spec, getattr(self, name), flag_label))
        _check_amount(self.policy, self.budget, self.keep, flag_label)
        if self.prunes and self.arm in ARMS_WITHOUT_PRUNING:
            raise ConfigError("--vtoken-arm", "needs --vtoken-policy none", self.arm)
        if not self.prunes and self.arm not in ARMS_WITHOUT_PRUNING:
            raise ConfigError("--vtoken-arm", "needs a --vtoken-policy other than none", self.arm)

    @property
    def prunes(self) -> bool:
        """Whether requests are pruned unless they say otherwise."""
        return self.policy != NO_POLICY

    @property
    def reclaims(self) -> bool:
        """Whether emptied pages go back to the allocator."""
        return self.arm == "reclaim"

    def validate_for_page_size(self, page_size: int) -> None:
        """Check what only the engine's page size (tokens) can decide. Raises ConfigError."""
        _check_budget_room(self, page_size, flag_label)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> VTokenConfig:
        """Inverse of `to_json`. Raises ConfigError on anything but exactly known fields."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(ENVIRONMENT_VARIABLE, f"must be JSON ({error})", text) from None
        if not isinstance(fields, dict):
            raise ConfigError(ENVIRONMENT_VARIABLE, "must be a JSON object", text)
        _check_known(fields, SPECS, flag_label)
        return cls(**fields)


def flag_specs() -> tuple[FlagSpec, ...]:
    """Every flag as data, in the order of the help text."""
    return tuple(SPECS.values())


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to any parser. Values stay text, absent ones None, until `from_namespace`
    reads them, so that a bad value is reported the same way wherever it came from."""
    group = parser.add_argument_group("vtoken (token-level KV-cache virtualization)")
    for spec in flag_specs():
        text = spec.help
        if spec.default not in (None, "", False):
            text += f" (default: {spec.default})"
        if spec.kind is bool:
            group.add_argument(
                spec.flag, dest=spec.destination, action="store_true", default=None, help=text
            )
            continue
        metavar = "{" + ",".join(spec.choices) + "}" if spec.choices else spec.kind.__name__.upper()
        group.add_argument(
            spec.flag, dest=spec.destination, default=None, metavar=metavar, help=text
        )


def from_namespace(namespace: argparse.Namespace) -> VTokenConfig | None:
    """The configuration a parsed command line asks for; None when `--vtoken-policy` is absent.

    Accepts text (`add_flags`) and typed values alike.

    Raises:
        ConfigError: a bad value, or another `--vtoken-*` flag without `--vtoken-policy`.
    """
    given: dict[str, Any] = {}
    for name, spec in SPECS.items():
        value = getattr(namespace, spec.destination, None)
        if value is not None:
            given[name] = parse_text(spec, value, flag_label) if isinstance(value, str) else value
    if "policy" not in given:
        for name, value in given.items():
            rule = "needs --vtoken-policy, which is what switches the product on"
            raise ConfigError(flag_label(name), rule, value)
        return None
    return VTokenConfig(**given)


def split_arguments(arguments: Sequence[str]) -> tuple[VTokenConfig | None, list[str]]:
    """Take the `--vtoken-*` flags out of a command line; the rest is returned in order.

    Raises:
        ConfigError: as `from_namespace`, or an unknown `--vtoken-*` flag, or one without value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    try:
        namespace, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(error.argument_name or "--vtoken-*", error.message, None) from None
    for argument in rest:
        if argument.startswith("--vtoken-"):
            flag = argument.partition("=")[0]
            known = ", ".join(spec.flag for spec in flag_specs())
            raise ConfigError(flag, f"is not an option; options are {known}", argument)
    return from_namespace(namespace), rest


def from_environment(environment: Mapping[str, str] = os.environ) -> VTokenConfig | None:
    """The configuration the parent process set; None when it set none. Raises ConfigError."""
    text = environment.get(ENVIRONMENT_VARIABLE)
    return None if text is None else VTokenConfig.from_json(text)


def to_environment(
    config: VTokenConfig, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Hand `config` to the processes started from here on."""
    environment[ENVIRONMENT_VARIABLE] = config.to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What holds for one request: the server's defaults, overridden by its own dict.

    With `policy` "none" nothing of the request is pruned, and `budget` and `keep` are None;
    otherwise exactly one of them is set.
    """

    policy: str
    budget: int | None
    keep: float | None
    sink: int
    recent: int
    interval: int
    seed: int
    reuse_prefix_scores: str
    shared: str
    publish: str

    @property
    def prunes(self) -> bool:
        return self.policy != NO_POLICY

    @property
    def may_fork(self) -> bool:
        """Whether copy-on-write may take it out of the prefix cache."""
        return self.prunes and self.shared in ("cow", "auto")

    @classmethod
    def resolve(
        cls, config: VTokenConfig, raw: object, *, page_size: int | None = None
    ) -> RequestOptions:
        """Merge `custom_params["vtoken"]` (`raw`; None when absent) into the server's defaults.

        `page_size` (tokens), when given, also checks that a budget leaves room to work.

        Raises:
            ConfigError: field `vtoken.<name>`, the rule and the value, when `raw` is not a dict,
                names an unknown field, has a bad value, or asks a server that cannot prune to.
        """
        given = _check_request(config, raw)
        values = {name: getattr(config, name) for name in REQUEST_FIELDS} | given
        if "budget" in given and "keep" not in given:
            values["keep"] = None
        if "keep" in given and "budget" not in given:
            values["budget"] = None
        if given.get("policy") == NO_POLICY:
            values |= {"budget": given.get("budget"), "keep": given.get("keep")}
        options = cls(**values)
        _check_amount(options.policy, options.budget, options.keep, request_label)
        if page_size is not None and given:
            _check_budget_room(options, page_size, request_label)
        return options


REQUEST_FIELDS: Final = tuple(name for name, spec in SPECS.items() if spec.per_request)


def _check_request(config: VTokenConfig, raw: object) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError("vtoken", "must be an object of options", raw)
    _check_known(raw, REQUEST_FIELDS, request_label)
    given: dict[str, Value] = {}
    for name, value in raw.items():
        if value is None:
            kind = SPECS[name].kind.__name__
            raise ConfigError(request_label(name), f"must be of type {kind}", value)
        given[name] = check_value(SPECS[name], value, request_label)
    if not config.prunes:
        for name in ("policy", "budget", "keep"):
            if given.get(name, NO_POLICY) != NO_POLICY:
                rule = (
                    f"this server prunes nothing (--vtoken-policy none, arm {config.arm}); "
                    "start it with a --vtoken-policy to prune"
                )
                raise ConfigError(request_label(name), rule, given[name])
    return given


def _check_known(fields: Mapping[Any, object], known: Iterable[str], label: Label) -> None:
    known = tuple(known)
    for name, value in fields.items():
        if name not in known:
            shown = name if isinstance(name, str) and name.isprintable() else repr(name)
            rule = "is not an option; options are " + ", ".join(known)
            raise ConfigError(label(shown), rule, value)


def _check_amount(policy: str, budget: int | None, keep: float | None, label: Label) -> None:
    amount = {name: v for name, v in (("budget", budget), ("keep", keep)) if v is not None}
    both = f"{label('budget')} or {label('keep')}"
    if len(amount) == 2:
        raise ConfigError(label("keep"), f"give {both}, not both", keep)
    if policy == NO_POLICY and amount:
        ((name, value),) = amount.items()
        raise ConfigError(label(name), f"needs a {label('policy')} other than none", value)
    if policy != NO_POLICY and not amount:
        raise ConfigError(label("policy"), f"needs {both}", policy)


def _check_budget_room(
    options: VTokenConfig | RequestOptions, page_size: int, label: Label
) -> None:
    if page_size < 1:
        raise ConfigError("page size", "must be at least 1", page_size)
    least = options.sink + options.recent + page_size
    if options.budget is not None and options.budget < least:
        parts = f"{label('sink')} + {label('recent')} + one page ({page_size} tokens)"
        raise ConfigError(label("budget"), f"must be at least {parts} = {least}", options.budget)
