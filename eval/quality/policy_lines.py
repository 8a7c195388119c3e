"""`max_policy_lines`: how long the longest file of a policy is, comments and docstring included."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vtoken_sglang.policy.names import BUILT_IN


def policy_lines() -> dict[str, int]:
    """Policy -> lines of its file."""
    found = {}
    for name, target in BUILT_IN.items():
        spec = find_spec(target.partition(":")[0])
        assert spec is not None
        assert spec.origin is not None
        found[name] = len(Path(spec.origin).read_text("utf-8").splitlines())
    return found


def lines_figure() -> dict[str, dict[str, Any]]:
    """The figure, with every policy's count as its spread."""
    lines = policy_lines()
    return {
        "max_policy_lines": {
            "value": max(lines.values()),
            "unit": "lines of the longest policy's file, blank ones and documentation included",
            "spread": lines,
        }
    }
