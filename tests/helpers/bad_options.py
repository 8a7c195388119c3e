"""Bad option values with a word of the rule each breaks; shared by server and request options."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vtoken_sglang.errors import ConfigError

BAD_VALUES: list[tuple[str, object, str]] = [
    ("budget", 0, "at least 1"),
    ("budget", 2**31, "at most"),
    ("budget", 1.0, "type int"),
    ("budget", True, "type int"),
    ("budget", "64", "type int"),
    ("keep", 0, "above 0"),
    ("keep", 0.0, "above 0"),
    ("keep", 1.0001, "at most 1"),
    ("keep", math.nan, "above 0"),
    ("keep", math.inf, "at most 1"),
    ("keep", True, "type float"),
    ("keep", "0.5", "type float"),
    ("sink", -1, "at least 0"),
    ("recent", -1, "at least 0"),
    ("recent", None, "type int"),
    ("recent", 0.0, "share above 0.0 and below 1.0"),
    ("recent", 1.0, "share above 0.0 and below 1.0"),
    ("recent", math.nan, "share above 0.0 and below 1.0"),
    ("recent", True, "type int"),
    ("policy_args", [], "JSON object"),
    ("policy_args", None, "JSON object"),
    ("policy_args", "window=3", "JSON object"),
    ("policy_args", {str(n): n for n in range(65)}, "at most 64"),
    ("policy_args", {"a": math.inf}, "finite"),
    ("interval", 0, "at least 1"),
    ("seed", -1, "at least 0"),
    ("seed", 2**63, "at most"),
    ("reuse_prefix_scores", "yes", "one of on, off"),
    ("reuse_prefix_scores", True, "type str"),
    ("shared", "all", "one of skip, mask"),
    ("publish", "always", "one of prompt, never"),
    ("policy", "", "not be empty"),
    ("policy", 3, "type str"),
]


def refused(call: Any, *arguments: Any, **values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **values)
    return caught.value
