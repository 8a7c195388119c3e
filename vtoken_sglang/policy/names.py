"""Which policy names exist, told without importing a policy (so without torch).

Built-in names stand in a table; third parties add theirs by an entry point of the group
`vtoken_sglang.policies` whose value is `module:Class`, and only its metadata is read here.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Final

from vtoken_sglang.errors import ConfigError
from vtoken_sglang.options import NO_POLICY

ENTRY_POINT_GROUP: Final = "vtoken_sglang.policies"
BUILT_IN: Final = MappingProxyType(
    {
        "h2o": "vtoken_sglang.policy.h2o:H2O",
        "keydiff": "vtoken_sglang.policy.keydiff:KeyDiff",
        "knorm": "vtoken_sglang.policy.knorm:Knorm",
        "random": "vtoken_sglang.policy.random:Random",
        "scissorhands": "vtoken_sglang.policy.scissorhands:Scissorhands",
        "snapkv": "vtoken_sglang.policy.snapkv:SnapKV",
        "streaming_llm": "vtoken_sglang.policy.streaming_llm:StreamingLLM",
        "tova": "vtoken_sglang.policy.tova:TOVA",
    }
)


@cache
def policy_targets() -> MappingProxyType[str, str]:
    """Name -> `module:Class` of every policy installed now; read once per process.

    Raises:
        ConfigError: an entry point takes a name that is reserved or already taken.
    """
    targets = dict(BUILT_IN)
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == NO_POLICY or entry.name in targets:
            taken_by = targets.get(entry.name, "the reserved name for no pruning")
            raise ConfigError(
                f"entry point {ENTRY_POINT_GROUP}:{entry.name}",
                f"the name is already taken by {taken_by}",
                entry.value,
            )
        targets[entry.name] = entry.value
    return MappingProxyType(dict(sorted(targets.items())))


def check_installed(name: str, field: str) -> None:
    """Refuse a policy that is not installed. Raises ConfigError, which names `field`."""
    if name != NO_POLICY and name not in policy_targets():
        names = ", ".join((NO_POLICY, *policy_targets()))
        raise ConfigError(field, f"must be an installed policy ({names})", name)
