"""Every option, declared once: flags, environment, request dict and help all come from here.

A field of `PruningOptions` holds for a server and may be overridden by a request; a further field
of `VTokenConfig` holds for a server only. The one frozen configuration is built once, from flags
(`option_flags`), and travels to SGLang's other processes as JSON in a single environment variable,
read only by `from_environment`. Deeper code is handed the object. An unknown or invalid value is an
error, never a default. Whether a policy is installed, and takes the arguments given, is asked by
`policy.registry`. Standard library only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final

from vtoken_sglang.errors import ConfigError, shown
from vtoken_sglang.option_values import (
    NO_ARGUMENTS,
    Arguments,
    Kind,
    Label,
    Number,
    Option,
    Switch,
    Text,
    flag_label,
    request_label,
)

ENVIRONMENT_VARIABLE: Final = "VTOKEN_SGLANG_CONFIG"
NO_POLICY: Final = "none"
ARMS: Final = ("native", "hook-only", "naive", "reclaim")
ABLATIONS: Final = ("native", "naive", "sync-copy", "retract", "full-admission")


def _option(default: object, kind: Kind, help: str, *, listed: bool = True) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help, "listed": listed})


@dataclass(frozen=True, slots=True, kw_only=True)
class PruningOptions:
    """How requests are pruned. With `policy` "none" nothing is, and `budget` and `keep` are None;
    otherwise exactly one of them is set."""

    policy: str = _option(
        NO_POLICY,
        Text(),
        "eviction policy, or 'none'; giving this flag is what switches the product on",
    )
    policy_args: str = _option(
        NO_ARGUMENTS,
        Arguments(),
        "the policy's own parameters, such as '{\"window\": 32}'; see `vtoken-sglang policies`",
    )
    budget: int | None = _option(
        None, Number(minimum=1), "tokens kept per request (give this or --vtoken-keep)"
    )
    keep: float | None = _option(
        None,
        Number(type=float, above=0.0, maximum=1.0),
        "share of the logical length kept per request (give this or --vtoken-budget)",
    )
    sink: int = _option(4, Number(minimum=0), "first tokens that are never evicted")
    recent: int | float = _option(
        32,
        Number(minimum=0, share=True),
        "last tokens that are never evicted; a share such as 0.5 is of the tokens kept",
    )
    interval: int = _option(16, Number(minimum=1), "new tokens of a request between two evictions")
    seed: int = _option(0, Number(minimum=0, maximum=2**63 - 1), "seed of policies that draw")
    reuse_prefix_scores: str = _option(
        "on",
        Text(choices=("on", "off")),
        "start the scores of a cached prefix from what the request that computed it gathered; "
        "for policies that add up attention over queries (h2o, scissorhands)",
    )
    shared: str = _option(
        "auto",
        Text(choices=("skip", "mask", "cow", "auto")),
        "evicted tokens in pages the radix tree owns: skip leaves them, mask drops them from "
        "attention, cow copies the live ones to private pages and lets the prefix go, auto masks "
        "and copies where it pays",
    )
    publish: str = _option(
        "prompt",
        Text(choices=("prompt", "never")),
        "whether the prompt of a request that is pruned seeds the prefix cache",
    )

    @property
    def prunes(self) -> bool:
        """Whether anything is evicted. Of a server: unless a request says otherwise."""
        return self.policy != NO_POLICY

    def recent_of(self, kept: int) -> int:
        """Last tokens that are never evicted where `kept` are kept in all, rounded down."""
        if isinstance(self.recent, int):
            return self.recent
        return int(self.recent * kept + 1e-6)  # 0.29 of 100 is 29, its float product is less


@dataclass(frozen=True, slots=True, kw_only=True)
class VTokenConfig(PruningOptions):
    """All settings of one server.

    Raises:
        ConfigError: a value has the wrong type, breaks its range, or contradicts another field.
            The field is named as its flag.
    """

    observe_layers: str = _option(
        "all",
        Text(
            pattern=r"none|all|last|every:[1-9][0-9]{0,3}",
            rule="must be 'none', 'all', 'last' or 'every:K' with K at least 1",
        ),
        "layers whose attention is observed for policies that look at it: all, last, or "
        "every:K (each K-th, counted back from the last); none refuses such policies, and captured "
        "graphs are spared the kernels that look",
    )
    observe_every: int = _option(
        1, Number(minimum=1), "observe the queries at each K-th position only"
    )
    repack_threshold: float = _option(
        0.25,
        Number(type=float, minimum=0.0, maximum=1.0),
        "repack a request once this share of its retained pages is empty",
    )
    check: bool = _option(False, Switch(), "verify every invariant at every step (slow; for tests)")
    trace: str | None = _option(
        None, Text(), "append each eviction decision to this file, one JSON object a line"
    )
    ablation: str = _option(
        "", Text(choices=ABLATIONS, several=True), "for measurements", listed=False
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.check(getattr(self, name), flag_label))
        _check_amount(self, flag_label)
        if self.prunes and self.ablates("native"):
            raise ConfigError("--vtoken-ablation", "native needs --vtoken-policy none", "native")
        if not self.prunes and self.ablates("naive"):
            raise ConfigError("--vtoken-ablation", "naive needs a --vtoken-policy", "naive")

    def ablates(self, name: str) -> bool:
        """Whether one of `ABLATIONS` is asked for."""
        return name in self.ablation.split(",")

    @property
    def arm(self) -> str:
        """One of `ARMS`. native: attention backend only; hook-only: slot map in force, nothing
        evicted; naive: evict, free nothing; reclaim: evict and free."""
        if self.prunes:
            return "naive" if self.ablates("naive") else "reclaim"
        return "native" if self.ablates("native") else "hook-only"

    @property
    def reclaims(self) -> bool:
        """Whether emptied pages go back to the allocator."""
        return self.arm == "reclaim"

    @property
    def copy(self) -> str:
        """async: repack beside the model's step; sync: wait for each copy."""
        return "sync" if self.ablates("sync-copy") else "async"

    @property
    def shortage(self) -> str:
        """When a decode step does not fit. relieve: evict ahead of the interval, reclaim and copy
        first; retract: wait for copies in flight at most, then retract requests."""
        return "retract" if self.ablates("retract") else "relieve"

    @property
    def admission(self) -> str:
        """What a request that will be pruned is charged: the tokens it is `expected` to hold, or
        its `full` length as SGLang does."""
        return "full" if self.ablates("full-admission") else "expected"

    def validate_for_page_size(self, page_size: int) -> None:
        """Check what only the engine's page size (tokens) can decide. Raises ConfigError."""
        _check_budget_room(self, page_size, flag_label)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> VTokenConfig:
        """Inverse of `to_json`. Raises ConfigError on anything but exactly known fields."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(ENVIRONMENT_VARIABLE, f"must be JSON ({error})", text) from None
        if not isinstance(values, dict):
            raise ConfigError(ENVIRONMENT_VARIABLE, "must be a JSON object", text)
        _check_known(values, OPTIONS, flag_label)
        return cls(**values)


REQUEST_FIELDS: Final = tuple(option.name for option in fields(PruningOptions))
OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(
    {
        found.name: Option(
            name=found.name,
            default=found.default,
            per_request=found.name in REQUEST_FIELDS,
            **found.metadata,
        )
        for found in fields(VTokenConfig)
    }
)
"""Every option by name, in the order of the help text."""


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
class RequestOptions(PruningOptions):
    """What holds for one request: the server's defaults, overridden by its own dict. Hashable."""

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
        values = {name: getattr(config, name) for name in REQUEST_FIELDS}
        if given.get("policy", config.policy) != config.policy:
            values["policy_args"] = NO_ARGUMENTS  # the server's are for its own policy
        if "budget" in given or "keep" in given or given.get("policy") == NO_POLICY:
            values |= {"budget": None, "keep": None}
        options = cls(**(values | given))
        _check_amount(options, request_label)
        if page_size is not None and given:
            _check_budget_room(options, page_size, request_label)
        return options


def _check_request(config: VTokenConfig, raw: object) -> dict[str, Any]:
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError("vtoken", "must be an object of options", raw)
    _check_known(raw, REQUEST_FIELDS, request_label)
    given = {
        name: OPTIONS[name].kind.check(request_label(name), value) for name, value in raw.items()
    }
    if not config.prunes:
        for name in ("policy", "budget", "keep"):
            if given.get(name, NO_POLICY) != NO_POLICY:
                rule = (
                    f"this server prunes nothing (--vtoken-policy none, arm {config.arm}); "
                    "start it with a --vtoken-policy to prune"
                )
                raise ConfigError(request_label(name), rule, given[name])
    return given


def _check_known(values: Mapping[Any, object], known: Iterable[str], label: Label) -> None:
    known = tuple(known)
    for name, value in values.items():
        if name not in known:
            rule = "is not an option; options are " + ", ".join(known)
            raise ConfigError(label(name if isinstance(name, str) else shown(name)), rule, value)


def _check_amount(options: PruningOptions, label: Label) -> None:
    amounts = {"budget": options.budget, "keep": options.keep}
    given = {name: value for name, value in amounts.items() if value is not None}
    both = f"{label('budget')} or {label('keep')}"
    if len(given) == 2:
        raise ConfigError(label("keep"), f"give {both}, not both", options.keep)
    if options.prunes and not given:
        raise ConfigError(label("policy"), f"needs {both}", options.policy)
    if options.policy_args != NO_ARGUMENTS:
        given["policy_args"] = options.policy_args  # type: ignore[assignment]
    for name, value in given.items():
        if not options.prunes:
            raise ConfigError(label(name), f"needs a {label('policy')} other than none", value)


def _check_budget_room(options: PruningOptions, page_size: int, label: Label) -> None:
    if page_size < 1:
        raise ConfigError("page size", "must be at least 1", page_size)
    if options.budget is None:
        return
    least = options.sink + options.recent_of(options.budget) + page_size
    if options.budget < least:
        parts = f"{label('sink')} + {label('recent')} + one page ({page_size} tokens)"
        raise ConfigError(label("budget"), f"must be at least {parts} = {least}", options.budget)
