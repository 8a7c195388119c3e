"""Hooks of the launching process: flags, config, refusals, request validation, handshake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vtoken_sglang import option_flags
from vtoken_sglang.engine.plugin import launch
from vtoken_sglang.engine.plugin.attestation import ATTESTATION_KEY
from vtoken_sglang.engine.plugin.hook import hook
from vtoken_sglang.engine.plugin.installation import exit_if_refused

if TYPE_CHECKING:
    import argparse

    from sglang.srt.managers.data_parallel_controller import DataParallelController
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs


@hook(
    after="sglang.srt.server_args.ServerArgs.add_cli_args",
    why="--vtoken-* flags on SGLang's own command line",
    remove_when="SGLang lets a plugin declare server arguments",
)
def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """Add the --vtoken-* flags."""
    option_flags.add_flags(parser)


@hook(
    after="sglang.srt.server_args.ServerArgs.from_cli_args",
    why="turns the flags into one frozen config that child processes inherit",
    remove_when="SGLang lets a plugin declare server arguments",
)
def activate_from_arguments(
    server_args: ServerArgs, _cls: type, arguments: argparse.Namespace
) -> None:
    """Freeze the options, or exit."""
    with exit_if_refused():
        launch.activate(server_args, arguments)


@hook(
    after="sglang.srt.server_args.ServerArgs.check_server_args",
    why="unsupported engine modes are refused before the model loads",
    remove_when="SGLang gives plugins a validation call-out",
)
def refuse_unsupported_arguments(_result: None, server_args: ServerArgs) -> None:
    """Exit if a mode would be half-served."""
    with exit_if_refused():
        launch.check_arguments(server_args)


@hook(
    after="sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
    why="a scheduler that came up without the plugin must not be served",
    remove_when="SGLang fails when a plugin fails",
)
def check_attestation(scheduler_infos: list[dict[str, Any]], *_args: Any, **_kwargs: Any) -> None:
    """Exit unless every scheduler has attested our config."""
    with exit_if_refused():
        launch.check_attestations(scheduler_infos)


@hook(
    after="sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
    why="carries the schedulers' attestations through the data-parallel controller",
    remove_when="the controller forwards unknown ready fields",
)
def forward_attestation(info: dict[str, Any], controller: DataParallelController) -> dict[str, Any]:
    """Forward what all schedulers attested."""
    attestations = [i.get(ATTESTATION_KEY) for i in controller._scheduler_init_infos]
    if attestations and all(each == attestations[0] for each in attestations):
        info[ATTESTATION_KEY] = attestations[0]
    return info


@hook(
    after="sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
    why="a malformed per-request option gives HTTP 400 instead of being ignored",
    remove_when="SGLang validates custom_params through a registry",
)
def validate_request(
    tokenized: object, manager: TokenizerManager, *_args: Any, **_kwargs: Any
) -> None:
    """Raise ConfigError (a ValueError) for a malformed option; SGLang answers with status 400."""
    launch.check_request(tokenized, manager)
