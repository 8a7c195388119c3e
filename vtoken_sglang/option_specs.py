"""Every option of the product as data: name, kind, range, help. One table serves the command
line, the environment variable and the per-request dict, so the three cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from vtoken_sglang.errors import ConfigError
from vtoken_sglang.policy.names import NO_POLICY, policy_targets

Value = str | int | float | bool | None
Label = Callable[[str], str]

MAX_TOKENS: Final = 2**31 - 1
OBSERVED_LAYERS: Final = r"none|all|last|every:[1-9][0-9]{0,3}"
ARMS: Final = ("native", "hook-only", "naive", "reclaim")
ARMS_WITHOUT_PRUNING: Final = ("native", "hook-only")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSpec:
    """One option.

    Fields:
        name: field name in `VTokenConfig`; a request spells it `vtoken.<name>`.
        kind: str, int, float or bool. An int is accepted where a float is meant; a bool is
            never accepted as a number.
        default: value when not given; None means "not set" where `optional`.
        choices: allowed strings, empty when any is allowed.
        pattern, rule: regular expression that a string must match as a whole, and what to say when
            it does not; empty when any is allowed.
        minimum, maximum: inclusive bounds of a number; `above` is an exclusive lower bound.
        per_request: whether a request may override it.
    """

    name: str
    kind: type
    help: str
    default: Value
    choices: tuple[str, ...] = ()
    pattern: str = ""
    rule: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    optional: bool = False
    per_request: bool = False

    @property
    def flag(self) -> str:
        return flag_label(self.name)

    @property
    def destination(self) -> str:
        """Attribute of an `argparse.Namespace`."""
        return "vtoken_" + self.name


def flag_label(name: str) -> str:
    """`repack_threshold` -> `--vtoken-repack-threshold`."""
    return "--vtoken-" + name.replace("_", "-")


def request_label(name: str) -> str:
    """`keep` -> `vtoken.keep`, as typed inside `custom_params`."""
    return "vtoken." + name


_SPECS: Final = (
    FlagSpec(
        name="policy",
        kind=str,
        default=NO_POLICY,
        per_request=True,
        help="eviction policy, or 'none'; giving this flag is what switches the product on",
    ),
    FlagSpec(
        name="arm",
        kind=str,
        default="",
        choices=ARMS,
        help="native: attention backend only; hook-only: slot map in force, nothing evicted; "
        "naive: evict, free nothing; reclaim: evict and free "
        "(default: hook-only without a policy, else reclaim)",
    ),
    FlagSpec(
        name="budget",
        kind=int,
        default=None,
        minimum=1,
        maximum=MAX_TOKENS,
        optional=True,
        per_request=True,
        help="tokens kept per request (give this or --vtoken-keep)",
    ),
    FlagSpec(
        name="keep",
        kind=float,
        default=None,
        above=0.0,
        maximum=1.0,
        optional=True,
        per_request=True,
        help="share of the logical length kept per request (give this or --vtoken-budget)",
    ),
    FlagSpec(
        name="sink",
        kind=int,
        default=4,
        minimum=0,
        maximum=MAX_TOKENS,
        per_request=True,
        help="first tokens that are never evicted",
    ),
    FlagSpec(
        name="recent",
        kind=int,
        default=32,
        minimum=0,
        maximum=MAX_TOKENS,
        per_request=True,
        help="last tokens that are never evicted",
    ),
    FlagSpec(
        name="interval",
        kind=int,
        default=16,
        minimum=1,
        maximum=MAX_TOKENS,
        per_request=True,
        help="new tokens of a request between two evictions",
    ),
    FlagSpec(
        name="seed",
        kind=int,
        default=0,
        minimum=0,
        maximum=2**63 - 1,
        per_request=True,
        help="seed of policies that draw",
    ),
    FlagSpec(
        name="reuse_prefix_scores",
        kind=str,
        default="on",
        choices=("on", "off"),
        per_request=True,
        help="start the scores of a cached prefix from what the request that computed it gathered; "
        "for policies that add up attention over queries (h2o, scissorhands)",
    ),
    FlagSpec(
        name="observe_layers",
        kind=str,
        default="all",
        pattern=OBSERVED_LAYERS,
        rule="must be 'none', 'all', 'last' or 'every:K' with K at least 1",
        help="layers whose attention is observed for policies that look at it: all, last, or "
        "every:K (each K-th, counted back from the last); none refuses such policies, and captured "
        "graphs are spared the kernels that look",
    ),
    FlagSpec(
        name="observe_every",
        kind=int,
        default=1,
        minimum=1,
        maximum=MAX_TOKENS,
        help="observe the queries at each K-th position only",
    ),
    FlagSpec(
        name="shared",
        kind=str,
        default="auto",
        choices=("skip", "mask", "cow", "auto"),
        per_request=True,
        help="evicted tokens in pages the radix tree owns: skip leaves them, mask drops them from "
        "attention, cow copies the live ones to private pages and lets the prefix go, auto masks "
        "and copies where it pays",
    ),
    FlagSpec(
        name="publish",
        kind=str,
        default="prompt",
        choices=("prompt", "never"),
        per_request=True,
        help="whether the prompt of a request that is pruned seeds the prefix cache",
    ),
    FlagSpec(
        name="admission",
        kind=str,
        default="expected",
        choices=("expected", "full"),
        help="what a request that will be pruned is charged when it is admitted: the tokens it is "
        "expected to hold, or its full length as SGLang does; a request may outgrow the pool only "
        "with expected",
    ),
    FlagSpec(
        name="shortage",
        kind=str,
        default="relieve",
        choices=("relieve", "retract"),
        help="when a decode step does not fit: evict ahead of the interval, reclaim and copy first "
        "(relieve), or wait for copies in flight at most, then take requests back (retract)",
    ),
    FlagSpec(
        name="copy",
        kind=str,
        default="async",
        choices=("async", "sync"),
        help="repack beside the model's step, or wait for each copy",
    ),
    FlagSpec(
        name="repack_threshold",
        kind=float,
        default=0.25,
        minimum=0.0,
        maximum=1.0,
        help="repack a request once this share of its retained pages is dead",
    ),
    FlagSpec(
        name="page_mode",
        kind=str,
        default="off",
        choices=("off", "dense"),
        help="flashinfer: plan eager batches over page lists where every request's live tokens "
        "fill whole pages in order (dense), or always over token lists; not measured on a GPU yet",
    ),
    FlagSpec(
        name="check",
        kind=bool,
        default=False,
        help="verify every invariant at every step (slow; for tests)",
    ),
    FlagSpec(
        name="trace",
        kind=str,
        default=None,
        optional=True,
        help="append each eviction decision to this file, one JSON object a line",
    ),
)

SPECS: Final[Mapping[str, FlagSpec]] = MappingProxyType({spec.name: spec for spec in _SPECS})


def check_value(spec: FlagSpec, value: object, label: Label) -> Value:
    """`value` as the field's own type, or ConfigError. Never turns text into a number."""
    field = label(spec.name)
    if value is None and spec.optional:
        return None
    if spec.kind is bool and isinstance(value, bool):
        return value
    if spec.kind is str and isinstance(value, str):
        _check_text(spec, value, field)
        return value
    if spec.kind in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        _check_range(spec, value, field)
        return float(value) if spec.kind is float else value
    if spec.kind is float and isinstance(value, float):
        _check_range(spec, value, field)
        return value
    raise ConfigError(field, f"must be of type {spec.kind.__name__}", value)


def parse_text(spec: FlagSpec, text: str, label: Label) -> Value:
    """A flag's text as the field's own type, or ConfigError."""
    if spec.kind is str:
        return check_value(spec, text, label)
    try:
        number = spec.kind(text)
    except ValueError:
        rule = f"must be of type {spec.kind.__name__}"
        raise ConfigError(label(spec.name), rule, text) from None
    return check_value(spec, number, label)


def _check_text(spec: FlagSpec, value: str, field: str) -> None:
    if spec.name == "policy":
        if value != NO_POLICY and value not in policy_targets():
            names = ", ".join((NO_POLICY, *policy_targets()))
            raise ConfigError(field, f"must be an installed policy ({names})", value)
        return
    if spec.pattern:
        if not re.fullmatch(spec.pattern, value):
            raise ConfigError(field, spec.rule, value)
        return
    if not spec.choices:
        if not value:
            raise ConfigError(field, "must not be empty", value)
        return
    rule = "must be one of " + ", ".join(spec.choices)
    if value not in spec.choices:
        raise ConfigError(field, rule, value)


def _check_range(spec: FlagSpec, value: int | float, field: str) -> None:
    """Every float field has an upper bound, so NaN and the infinities fail a comparison."""
    good = (
        (spec.above is None or value > spec.above)
        and (spec.minimum is None or value >= spec.minimum)
        and (spec.maximum is None or value <= spec.maximum)
    )
    if not good:
        bounds = (("above", spec.above), ("at least", spec.minimum), ("at most", spec.maximum))
        rule = " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)
        raise ConfigError(field, f"must be {rule}", value)
