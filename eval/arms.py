"""The arms of a comparison. An arm is data: a name, what it is, and how its server is started.

To add one, append an entry to `ARMS`; nothing else changes. Policy, budget and seed are settings
of the evaluation, the same for every arm that prunes, so that arms make the same evictions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import ConfigError

PRUNING_SETTINGS = ("policy", "keep", "sink", "recent", "interval", "seed")


class PruningSettings(Protocol):
    """The settings of an evaluation that `PRUNING_SETTINGS` names."""

    @property
    def policy(self) -> str: ...

    @property
    def keep(self) -> float: ...

    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to serve the same requests.

    Fields:
        name: key used on the command line and in results.
        summary: one sentence for the report.
        vtoken_args: flags for `vtoken-sglang serve`; None starts SGLang's own launcher instead.
        reference: the arm that ratios of this one are taken against, in the same repeat;
            None for arms that are only ever a reference.
        prunes: whether it evicts; its server then also gets the evaluation's policy and budget.
        shared, publish: what a pruned request does with pages of the radix tree, and whether its
            prompt goes there; both may be set per request, so such arms can use one server.
        page_size: in place of the evaluation's.
        same_tokens_as: an arm that makes the same evictions and so must generate the same tokens.
    """

    name: str
    summary: str
    vtoken_args: tuple[str, ...] | None
    reference: str | None = None
    prunes: bool = False
    shared: str = "mask"
    publish: str = "prompt"
    page_size: int | None = None
    same_tokens_as: str | None = None

    def launcher(self) -> list[str]:
        """Command words up to and including the launcher; engine flags follow."""
        if self.vtoken_args is None:
            return [sys.executable, "-m", "sglang.launch_server"]
        return [sys.executable, "-m", "vtoken_sglang.cli", "serve"]

    def command(
        self,
        engine_args: Sequence[str],
        config: PruningSettings | None = None,
        shares: bool = False,
    ) -> list[str]:
        """Full server command.

        Args:
            engine_args: the same for every arm of a comparison.
            config: where the policy and its budget come from, for an arm that prunes.
            shares: the server is for several arms, which say per request what is theirs.
        """
        words = [*self.launcher(), *engine_args, *(self.vtoken_args or ())]
        if self.prunes and config is not None:
            for name in PRUNING_SETTINGS:
                words += [f"--vtoken-{name}", str(getattr(config, name))]
            if not shares:
                words += ["--vtoken-shared", self.shared, "--vtoken-publish", self.publish]
        return words

    def options(self, config: PruningSettings) -> dict[str, Any]:
        """What every request of this arm asks for (`custom_params["vtoken"]`)."""
        if not self.prunes:
            return {}
        settings = {name: getattr(config, name) for name in PRUNING_SETTINGS}
        return {**settings, "shared": self.shared, "publish": self.publish}


def _pruning(name: str, summary: str, *flags: str, **fields: Any) -> Arm:
    defaults: dict[str, Any] = {"reference": "naive", "same_tokens_as": "naive"}
    return Arm(name=name, summary=summary, vtoken_args=flags, prunes=True, **{**defaults, **fields})


ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm(
            name="stock",
            summary="SGLang untouched: its own launcher and its own attention backend.",
            vtoken_args=None,
        ),
        Arm(
            name="native",
            summary="SGLang with this project's CPU attention backend and nothing else of it.",
            vtoken_args=("--vtoken-policy", "none", "--vtoken-ablation", "native"),
            reference="stock",
        ),
        Arm(
            name="hook-only",
            summary="Token table and slot map in force on every step, nothing evicted.",
            vtoken_args=("--vtoken-policy", "none"),
            reference="native",
        ),
        _pruning(
            "naive",
            "Tokens are evicted from attention, no page is returned.",
            "--vtoken-ablation", "naive",
            reference="native", same_tokens_as=None,
        ),
        _pruning(
            "p1",
            "Eviction at page size 1: every dead private slot is free at once, nothing is moved.",
            page_size=1, same_tokens_as=None,
        ),
        _pruning(
            "p1-never",
            "Eviction at page size 1, prompts kept out of the prefix cache: theirs are freed, too.",
            page_size=1, publish="never", same_tokens_as=None,
        ),
        _pruning(
            "skip",
            "Reclaim private pages; shared pages are left as they are (the paper's choice).",
            shared="skip", same_tokens_as=None,
        ),
        _pruning(
            "mask",
            "Reclaim private pages; evicted tokens in shared pages only leave attention.",
        ),
        _pruning(
            "cow",
            "Reclaim; copy a request's survivors out of shared pages when it first evicts there.",
            shared="cow",
        ),
        _pruning(
            "auto",
            "Reclaim, mask shared pages, and copy out of them where the cost rule says it pays.",
            shared="auto",
        ),
        _pruning(
            "publish-never",
            "Reclaim with prompts kept out of the prefix cache: all pages are private.",
            shared="auto", publish="never",
        ),
        _pruning(
            "reclaim-async",
            "The arm auto under another name, to set beside reclaim-sync.",
            shared="auto",
        ),
        _pruning(
            "reclaim-sync",
            "As reclaim-async (auto), but the scheduler waits for every copy.",
            "--vtoken-ablation", "sync-copy",
            shared="auto",
        ),
    )
}  # fmt: skip


def select_arms(names: Sequence[str]) -> tuple[Arm, ...]:
    """Return the named arms in the given order.

    Raises:
        ConfigError: no name, an unknown name, or a name given twice.
    """
    if not names:
        raise ConfigError("arms", "at least one arm is needed", list(names))
    for name in names:
        if name not in ARMS:
            raise ConfigError("arms", f"must be among {', '.join(ARMS)}", name)
    if len(set(names)) != len(names):
        raise ConfigError("arms", "each arm may be named once", ",".join(names))
    return tuple(ARMS[name] for name in names)


def rotated(arms: Sequence[Arm], repeat: int) -> tuple[Arm, ...]:
    """Order of arms in one repeat (counted from 0): rotated, so that no arm is always first."""
    shift = repeat % len(arms)
    return (*arms[shift:], *arms[:shift])
