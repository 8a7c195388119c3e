"""A grid of comparisons, from TOML: settings shared by all, and tables whose lists are axes.

    repeats = 3
    page_size = 16

    [[grid]]
    workload = "multi_turn"
    arms = ["native", "naive", "auto"]
    sharing = [1, 8]            # two studies: a list for a setting that is no list itself

    [[grid]]
    workload = "reasoning"
    keep = [0.3, 0.5]
    policy = ["random", "streaming_llm"]

A study is one workload with one setting of everything; it holds a cell per arm and repeat. Keys
are the fields of `EvalConfig`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .arms import Arm, select_arms
from .config import CONFIGS, LIST_FIELDS, EvalConfig, read_toml
from .errors import ConfigError

AXES = "grid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One comparison of a grid.

    Fields:
        name: unique in the grid: the workload and what sets this study apart, usable as a folder.
        setting: the settings that vary over the grid's studies of this workload.
        config: all settings.
    """

    name: str
    setting: Mapping[str, Any]
    config: EvalConfig

    @property
    def arms(self) -> tuple[Arm, ...]:
        return select_arms(self.config.arms)


def read_grid(path: str, flags: Mapping[str, Any]) -> tuple[Study, ...]:
    """The studies of a TOML file or a shipped grid's name; flags win over both (None: not given).

    Raises:
        ConfigError: not readable, an unknown key, a wrong value, or two equal studies.
    """
    settings = read_toml(path)
    tables = settings.pop(AXES, None)
    if not isinstance(tables, list) or not tables:
        raise ConfigError("config", "a grid must hold at least one [[grid]] table", path)
    given = {key: value for key, value in flags.items() if value is not None}
    return make_grid(settings, tables, {"preset": Path(path).stem, **given})


def make_grid(
    base: Mapping[str, Any], tables: Sequence[Mapping[str, Any]], flags: Mapping[str, Any]
) -> tuple[Study, ...]:
    """Expand every table's axes; see the module's picture.

    Raises:
        ConfigError: as `read_grid`.
    """
    known = {field.name for field in dataclasses.fields(EvalConfig)}
    expanded: list[tuple[dict[str, Any], dict[str, Any]]] = []  # settings, the axes' part
    for table in tables:
        if not isinstance(table, Mapping):
            raise ConfigError("config", "[[grid]] must hold tables of settings", table)
        merged = {**base, **table, **flags}
        for key in merged:
            if key not in known:
                raise ConfigError("config", f"keys must be among {', '.join(sorted(known))}", key)
        axes = {
            key: value
            for key, value in merged.items()
            if isinstance(value, list) and key not in LIST_FIELDS
        }
        for key, value in axes.items():
            if not value:
                raise ConfigError("config", f"{key} must have at least one value", value)
        for values in itertools.product(*axes.values()):
            chosen = dict(zip(axes, values, strict=True))
            expanded.append(({**merged, **chosen}, chosen))
    configs = [EvalConfig(**settings) for settings, _ in expanded]
    studies = []
    for config, (_, chosen) in zip(configs, expanded, strict=True):
        setting = {**_varying(config, configs), **chosen}
        studies.append(Study(name=_name(config, setting), setting=setting, config=config))
    names = [study.name for study in studies]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError("config", "no two studies of a grid may be equal", twice)
    return tuple(studies)


def _varying(config: EvalConfig, configs: Sequence[EvalConfig]) -> dict[str, Any]:
    """The settings in which this study differs from others of its workload."""
    others = [other for other in configs if other.workload == config.workload]
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(EvalConfig)
        if field.name != "arms" and len({getattr(other, field.name) for other in others}) > 1
    }


def _name(config: EvalConfig, setting: Mapping[str, Any]) -> str:
    parts = [config.workload]
    for key, value in sorted(setting.items()):
        text = str(value).replace("/", "-").replace(" ", "-")[-24:]
        parts.append(f"{key.replace('_', '-')}-{text}")
    return "_".join(parts)


def is_grid(path: str) -> bool:
    """Whether a TOML file (or a shipped name) holds a grid."""
    return AXES in read_toml(path)


def shipped_grids() -> list[str]:
    """Names of the grids that come with the package."""
    return sorted(file.stem for file in CONFIGS.glob("*.toml") if is_grid(str(file)))
