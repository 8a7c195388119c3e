"""Loading policies by name, built-in or from the entry-point group `vtoken_sglang.policies`.

A third party's package declares

    [project.entry-points."vtoken_sglang.policies"]
    my_policy = "my_package.module:MyPolicy"

and its class, a `policy.base.Policy` that needs no arguments, is then known everywhere.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint
from textwrap import fill, indent

from vtoken_sglang.errors import ConfigError
from vtoken_sglang.option_specs import SPECS
from vtoken_sglang.policy.base import Observation, Policy
from vtoken_sglang.policy.names import BUILT_IN, ENTRY_POINT_GROUP, policy_targets

_COMMON_PARAMETERS = ("budget", "keep", "sink", "recent", "interval", "seed", "reuse_prefix_scores")
_WIDTH = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInfo:
    """One installed policy.

    Fields:
        name: what `--vtoken-policy` takes.
        target: `module:Class`.
        built_in: False for a third party's.
        parameters: the policy's own parameters with their defaults, as text; often none.
        doc: first paragraph of the class's and of its module's docstring.
        problem: why it cannot be loaded; empty when it can.
    """

    name: str
    target: str
    built_in: bool
    parameters: tuple[tuple[str, str], ...] = ()
    doc: str = ""
    problem: str = ""


@cache
def load_policy(name: str) -> Policy:
    """The process's instance of policy `name`, with default parameters.

    Raises:
        ConfigError: the name is not installed, its module does not import, or what it names is
            not a `Policy` that can be built without arguments and says what it observes.
    """
    target = policy_targets().get(name)
    if target is None:
        known = ", ".join(policy_targets())
        raise ConfigError("policy", f"must be an installed policy ({known})", name)
    field = f"policy {name}"
    try:
        found = EntryPoint(name=name, value=target, group=ENTRY_POINT_GROUP).load()
    except Exception as error:  # a third party's module may raise anything while it loads
        raise ConfigError(field, f"cannot be loaded ({error!r})", target) from error
    if not (inspect.isclass(found) and issubclass(found, Policy)):
        raise ConfigError(field, "must be a subclass of vtoken_sglang.policy.base.Policy", target)
    try:
        policy = found()
    except Exception as error:
        raise ConfigError(field, f"must need no arguments ({error!r})", target) from error
    rule = "must say what it observes: an Observation or None"
    try:
        asked = policy.observation()
    except Exception as error:
        raise ConfigError(field, f"{rule} ({error!r})", target) from error
    if not isinstance(asked, Observation | None):
        raise ConfigError(field, rule, asked)
    return policy


def check_observed(name: str, observe_layers: str, field: str) -> None:
    """Refuse policy `name` if it cannot be loaded, or if it looks at attention and the server
    observes none.

    Raises:
        ConfigError: with `field` named, or the policy itself.
    """
    looks_at_attention = load_policy(name).observation() is not None
    if observe_layers == "none" and looks_at_attention:
        rule = (
            "looks at attention, and this server observes none (--vtoken-observe-layers none); "
            "start it with another value"
        )
        raise ConfigError(field, rule, name)


def available() -> tuple[PolicyInfo, ...]:
    """Every installed policy by name, with parameters, defaults and what it does. One that
    cannot be loaded is listed with its problem, so that the others stay visible."""
    return tuple(_inform(name, target) for name, target in policy_targets().items())


def describe_policies() -> str:
    """The text of `vtoken-sglang policies`."""
    lines = ["policies (--vtoken-policy NAME, or per request custom_params.vtoken.policy):", ""]
    for info in available():
        lines.append(f"{info.name}  [{'built in' if info.built_in else info.target}]")
        if info.problem:
            lines += [_paragraph(f"NOT USABLE: {info.problem}"), ""]
            continue
        lines += [_paragraph(part) for part in info.doc.split("\n\n")]
        own = ", ".join(f"{name} = {default}" for name, default in info.parameters)
        fixed = f"{own} (fixed: a subclass with other defaults is another policy)"
        lines += [f"    parameters: {fixed if own else 'none of its own'}", ""]
    lines.append("parameters of every policy:")
    for name in _COMMON_PARAMETERS:
        spec = SPECS[name]
        default = "not set" if spec.default is None else spec.default
        lines.append(f"    {name} ({spec.kind.__name__}, default {default}): {spec.help}")
    return "\n".join(lines)


def _inform(name: str, target: str) -> PolicyInfo:
    built_in = name in BUILT_IN
    try:
        policy = load_policy(name)
    except ConfigError as error:
        return PolicyInfo(name=name, target=target, built_in=built_in, problem=str(error))
    parameters: list[tuple[str, str]] = []
    if is_dataclass(policy):
        parameters = [(field.name, repr(getattr(policy, field.name))) for field in fields(policy)]
    docs = (type(policy).__doc__, inspect.getdoc(inspect.getmodule(type(policy))))
    doc = "\n\n".join(inspect.cleandoc(text) for text in docs if text)
    return PolicyInfo(
        name=name, target=target, built_in=built_in, parameters=tuple(parameters), doc=doc
    )


def _paragraph(text: str) -> str:
    return indent(fill(" ".join(text.split()), _WIDTH - 4), "    ")
