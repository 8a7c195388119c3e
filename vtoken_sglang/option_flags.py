"""The options on a command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vtoken_sglang.errors import ConfigError, shortened
from vtoken_sglang.options import OPTIONS, VTokenConfig
from vtoken_sglang.policy.names import check_installed


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag to any parser. Values stay text, absent ones None, until `from_namespace`
    reads them, so that a bad value is reported the same way wherever it came from."""
    group = parser.add_argument_group("vtoken (token-level KV-cache virtualization)")
    for option in OPTIONS.values():
        text = option.help
        if option.default not in (None, "", False):
            text += f" (default: {option.default})"
        kind = option.kind
        metavar = "{" + ",".join(kind.choices) + "}" if kind.choices else kind.metavar
        shape: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
        group.add_argument(
            option.flag,
            dest=option.destination,
            default=None,
            help=text if option.listed else argparse.SUPPRESS,
            **shape,
        )


def from_namespace(namespace: argparse.Namespace) -> VTokenConfig | None:
    """The configuration a parsed command line asks for; None when `--vtoken-policy` is absent.

    Accepts text (`add_flags`) and typed values alike.

    Raises:
        ConfigError: a bad value, a policy that is not installed, or another `--vtoken-*` flag
            without `--vtoken-policy`.
    """
    given: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value = getattr(namespace, option.destination, None)
        if isinstance(value, str):
            value = option.kind.read(option.flag, value)
        if value is not None:
            given[name] = value
    if "policy" not in given:
        for name, value in given.items():
            rule = "needs --vtoken-policy, which is what switches the product on"
            raise ConfigError(OPTIONS[name].flag, rule, value)
        return None
    # First of all: what else a misspelt policy would need is of no use to its user.
    check_installed(given["policy"], OPTIONS["policy"].flag)
    return VTokenConfig(**given)


def split_arguments(arguments: Sequence[str]) -> tuple[VTokenConfig | None, list[str]]:
    """Take the `--vtoken-*` flags out of a command line; the rest is returned in order.

    Raises:
        ConfigError: as `from_namespace`, or an unknown `--vtoken-*` flag, or one without value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    try:
        namespace, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        rule = shortened(error.message)
        raise ConfigError(error.argument_name or "--vtoken-*", rule, None) from None
    for argument in rest:
        if argument.startswith("--vtoken-"):
            known = ", ".join(option.flag for option in OPTIONS.values() if option.listed)
            rule = f"is not an option; options are {known}"
            raise ConfigError(argument.partition("=")[0], rule, argument)
    return from_namespace(namespace), rest
