"""Loading policies by name, built-in or from the entry-point group `vtoken_sglang.policies`.

A third party's package declares

    [project.entry-points."vtoken_sglang.policies"]
    my_policy = "my_package.module:MyPolicy"

and its class, a `policy.base.Policy` that needs no arguments, is then known everywhere. The fields
of a policy that is a dataclass are its parameters; a server or a request may set them.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from importlib.metadata import EntryPoint
from typing import Any, get_args, get_type_hints

from vtoken_sglang.errors import ConfigError, shortened, shown
from vtoken_sglang.option_values import NO_ARGUMENTS, Label
from vtoken_sglang.options import PruningOptions
from vtoken_sglang.policy.base import Observation, Policy
from vtoken_sglang.policy.names import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    check_installed,
    policy_targets,
)

_HOW = """\
Choose one with --vtoken-policy NAME, or per request custom_params.vtoken.policy; set its parameters
with --vtoken-policy-args '{"window": 32}', or per request custom_params.vtoken.policy_args. What
every policy takes (keep or budget, sink, recent, interval, seed) stands in `serve --help`."""


@lru_cache(maxsize=256)
def load_policy(name: str, arguments: str = NO_ARGUMENTS) -> Policy:
    """The process's instance of policy `name` with `arguments` (as `PruningOptions.policy_args`).

    Raises:
        ConfigError: the name is not installed, its module does not import, what it names is not a
            `Policy` that can be built without arguments and says what it observes, or an argument
            is not one of its parameters or breaks its rule.
    """
    return _build(name, arguments, "policy_args")


def require_policy(options: PruningOptions, observe_layers: str, label: Label) -> None:
    """Refuse a policy that cannot be loaded with its arguments, or that looks at attention where
    the server observes none. `label` spells an option for the message. Raises ConfigError."""
    if not options.prunes:
        return
    check_installed(options.policy, label("policy"))
    try:
        policy = load_policy(options.policy, options.policy_args)
    except ConfigError:
        _build(options.policy, options.policy_args, label("policy_args"))  # names it as spelled
        raise
    if observe_layers == "none" and policy.observation() is not None:
        rule = (
            "looks at attention, and this server observes none (--vtoken-observe-layers none); "
            "start it with another value"
        )
        raise ConfigError(label("policy"), rule, options.policy)


def describe_policies() -> str:
    """The text of `vtoken-sglang policies`: a table. A policy that cannot be loaded is listed with
    its problem, so that the others stay visible."""
    rows = [("policy", "looks at", "parameters", "what it does")]
    rows += [_row(name, target) for name, target in policy_targets().items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    ]
    return "\n".join([*lines, "", _HOW])


def _row(name: str, target: str) -> tuple[str, str, str, str]:
    try:
        policy = load_policy(name)
    except ConfigError as error:
        return name, "", "", f"NOT USABLE: {error}"
    sees = "keys" if policy.reads_keys else "positions"
    sees = sees if policy.observation() is None else "attention"
    own = (f"{parameter}={getattr(policy, parameter)!r}" for parameter in _parameters(type(policy)))
    does = (inspect.getdoc(type(policy)) or "").partition("\n")[0]
    return name, sees, " ".join(own), does if name in BUILT_IN else f"{does} [{target}]"


def _build(name: str, arguments: str, field: str) -> Policy:
    """As `load_policy`; `field` is how the user spelled the arguments."""
    found = _load_class(name)
    given = _checked(found, json.loads(arguments), field)
    field = field if given else f"policy {name}"
    policy = _made(found, given, field)
    rule = "must say what it observes: an Observation or None"
    try:
        asked = policy.observation()
    except Exception as error:
        raise ConfigError(field, f"{rule} ({shown(error)})", arguments) from error
    if not isinstance(asked, Observation | None):
        raise ConfigError(field, rule, asked)
    return policy


@cache
def _load_class(name: str) -> type[Policy]:
    check_installed(name, "policy")
    target = policy_targets()[name]
    field = f"policy {name}"
    try:
        found = EntryPoint(name=name, value=target, group=ENTRY_POINT_GROUP).load()
    except Exception as error:  # a third party's module may raise anything while it loads
        raise ConfigError(field, f"cannot be loaded ({shown(error)})", target) from error
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        raise ConfigError(field, "must be a subclass of vtoken_sglang.policy.base.Policy", target)
    return found


def _made(found: type[Policy], given: dict[str, Any], field: str) -> Policy:
    try:
        return found(**given)
    except Exception as error:
        if not given:
            rule = f"must need no arguments ({shown(error)})"
            raise ConfigError(field, rule, found) from error
        if len(given) > 1:  # where one of them is at fault alone, it is named
            for name, value in given.items():
                _made(found, {name: value}, field)
            raise ConfigError(field, shortened(str(error)), given) from error
        ((name, value),) = given.items()
        raise ConfigError(f"{field}.{name}", shortened(str(error)), value) from error


def _parameters(found: type[Policy]) -> dict[str, Any]:
    """A policy's parameters with their types."""
    if not is_dataclass(found):
        return {}
    hints = get_type_hints(found)
    return {field.name: hints[field.name] for field in fields(found) if field.init}


def _checked(found: type[Policy], given: dict[str, Any], field: str) -> dict[str, Any]:
    """`given` in the types of the parameters; an int may stand for a float."""
    known = _parameters(found)
    checked = {}
    for name, value in given.items():
        if name not in known:
            names = ", ".join(known) or "none"
            raise ConfigError(f"{field}.{name}", f"is not a parameter; there are: {names}", value)
        types = get_args(known[name]) or (known[name],)
        if type(value) is int and float in types and int not in types:
            value = float(value)
        if type(value) not in types:
            kinds = " or ".join(getattr(kind, "__name__", str(kind)) for kind in types)
            raise ConfigError(f"{field}.{name}", f"must be of type {kinds}", value)
        checked[name] = value
    return checked
