"""The arms of a study, and the servers they need.

An arm is what its requests say for themselves (`custom_params["vtoken"]`), so that one server, with
its cache emptied in between, serves all of them. What only a start-up flag can change, an
*ablation*, has a server of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vtoken_sglang.options import NO_POLICY

from .options import AMOUNTS, WITHOUT_PRUNING, Options

NATIVE = "native"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve the same requests.

    Fields:
        name: in tables and plots, unique in a study.
        request: `custom_params["vtoken"]` of every request; empty for a server that knows none.
        ablation: the start-up switch of its server; empty: the server that most arms use.
        url: the server that already runs; empty: one that the study starts.
    """

    name: str
    request: dict[str, Any] = field(default_factory=dict)
    ablation: str = ""
    url: str = ""

    @property
    def prunes(self) -> bool:
        return bool(self.request.get("policy", NO_POLICY) != NO_POLICY)

    def columns(self) -> dict[str, Any]:
        """What the table says about it."""
        request = self.request
        return {
            "arm": self.name,
            "policy": request.get("policy", NO_POLICY),
            **{name: request.get(name) for name in AMOUNTS},
            "shared": request.get("shared", "-") if self.prunes else "-",
            "ablation": self.ablation,
            "request": request,
            "url": self.url,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Arms that one server serves: `key` is its ablation, or its URL."""

    key: str
    arms: tuple[Arm, ...]


def arm_name(request: dict[str, Any], ablation: str = "") -> str:
    """`snapkv 0.5 auto`, then whatever else the request says, then the ablation."""
    amount = request["keep"] if "keep" in request else f"b{request['budget']}"
    words = [str(request["policy"]), f"{amount:g}" if isinstance(amount, float) else amount]
    words.append(str(request.get("shared", "")))
    known = {"policy", "shared", "seed", *AMOUNTS}
    words += [f"{key}={value}" for key, value in request.items() if key not in known]
    return " ".join(filter(None, [*words, ablation]))


def groups_of(options: Options) -> tuple[Group, ...]:
    """Every arm, by the server that serves it. Native comes first, once per server."""
    native: dict[str, Any] = {"policy": NO_POLICY}
    requests = list(options.requests())
    if options.url:
        several = len(options.url) > 1
        return tuple(
            Group(
                key=url,
                arms=tuple(
                    Arm(name=name + (f" @{number + 1}" if several else ""), request=said, url=url)
                    for name, said in [(NATIVE, native), *((arm_name(r), r) for r in requests)]
                ),
            )
            for number, url in enumerate(options.url)
        )
    groups, main = [], bool(requests or not options.ablations)
    if main:
        arms = (
            Arm(name=NATIVE, request=native),
            *(Arm(name=arm_name(r), request=r) for r in requests),
        )
        groups.append(Group(key="", arms=arms))
    for ablation in options.ablations:
        if ablation in WITHOUT_PRUNING:
            name = f"{ablation} server" if ablation == NATIVE and main else ablation
            arms = (Arm(name=name, ablation=ablation),)
        else:
            # An ablation keeps no page from anybody for the sake of sharing: one way is enough.
            way = "mask" if ablation == "naive" else requests[-1]["shared"] if requests else "mask"
            once = {
                arm_name({**r, "shared": way}, ablation): {**r, "shared": way} for r in requests
            }
            arms = tuple(Arm(name=n, request=r, ablation=ablation) for n, r in once.items())
        groups.append(Group(key=ablation, arms=arms))
    return tuple(group for group in groups if group.arms)


def ablation_flags(ablation: str) -> list[str]:
    """How a server with this ablation is started."""
    prunes = ablation not in WITHOUT_PRUNING
    # A server whose requests may be pruned, and none is that does not ask for it.
    words = ["--vtoken-policy", "streaming_llm", "--vtoken-keep", "1.0"]
    if not prunes:
        words = ["--vtoken-policy", NO_POLICY]
    if ablation in ("", "hook-only"):
        return words
    return [*words, "--vtoken-ablation", ablation]


def launcher(ablation: str) -> list[str]:
    """Command words up to and including the launcher; SGLang's flags follow."""
    if ablation == "stock":
        return [sys.executable, "-m", "sglang.launch_server"]
    return [sys.executable, "-m", "vtoken_sglang.cli", "serve", *ablation_flags(ablation)]


def rotated(items: Sequence[T], shift: int) -> list[T]:
    """The items from place `shift` on, then those before it: no arm is always first."""
    shift %= len(items)
    return [*items[shift:], *items[:shift]]
