"""Studies in TOML: settings for all of a file, and a table `[[study]]` per comparison.

    repeats = 3
    policies = ["random"]
    [[study]]
    name = "nothing-shared"
    workload = "multi_turn"
    sharing = 1

Keys are the flags of `eval compare` with `_` for `-`; a flag on the command line wins over both. A
list is an axis where the setting is one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .options import Options, make_options

FOLDER = Path(__file__).parent / "studies"


def shipped() -> list[str]:
    """Names of the files that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_toml(name: str) -> dict[str, Any]:
    """The content of a TOML file, or of a shipped one by its name.

    Raises:
        ConfigError: no such file, or not TOML.
    """
    path = Path(name)
    if not path.exists() and name in shipped():
        path = FOLDER / f"{name}.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"must be a TOML file, or one of {', '.join(shipped())}"
        raise ConfigError("study", rule, name) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("study", f"must be TOML ({error})", name) from error


def read_studies(name: str, flags: Mapping[str, Any]) -> dict[str, Options]:
    """Every study of a file by its name, `flags` over what the file says.

    Raises:
        ConfigError: no such file, a bad setting, or no or twice the same name.
    """
    content = read_toml(name)
    tables = content.pop("study", [{"name": Path(name).stem}])
    content.pop("figures", None)
    found: dict[str, Options] = {}
    for table in tables:
        own = dict(table)
        label = own.pop("name", "")
        if not label or label in found:
            raise ConfigError("name", "every study needs a name of its own", label)
        found[label] = make_options({**content, **own, **flags})
    return found
