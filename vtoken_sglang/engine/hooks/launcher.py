"""Hooks of the launching process: flags, config, refusals, request validation, handshake."""

from __future__ import annotations

import argparse
from typing import Any

from vtoken_sglang import option_flags
from vtoken_sglang.engine.compat.arguments import BACKEND_FIELDS, refuse_server_args
from vtoken_sglang.engine.compat.requests import refuse_request
from vtoken_sglang.engine.plugin.attestation import ATTESTATION_KEY, expected_attestation
from vtoken_sglang.engine.plugin.hook import LAUNCHER_HOOKS, SCHEDULER_HOOKS
from vtoken_sglang.engine.plugin.installation import refuse, verify_installation
from vtoken_sglang.errors import ConfigError, HookError, VTokenError
from vtoken_sglang.option_values import flag_label, request_label
from vtoken_sglang.options import (
    RequestOptions,
    from_environment,
    to_environment,
)
from vtoken_sglang.policy.names import check_installed


def add_flags(_result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER `ServerArgs.add_cli_args`: add the --vtoken-* flags."""
    option_flags.add_flags(parser)


def activate_from_arguments(server_args: Any, _cls: type, arguments: argparse.Namespace) -> None:
    """AFTER `ServerArgs.from_cli_args`: freeze the options and hand them to child processes.

    The environment is the only channel that reaches every spawned process before SGLang
    publishes its arguments there. Runs before any model file is opened. Modes that the raw flags
    already name are refused here, since SGLang may stop or branch off before its own checks.
    """
    try:
        config = option_flags.from_namespace(arguments) or from_environment()
        if config is None:
            return
        check_installed(config.policy, flag_label("policy"))
        _check_trace(config.trace)
        to_environment(config)
        verify_installation(LAUNCHER_HOOKS + SCHEDULER_HOOKS)
        _prefer_our_backend(server_args)
        refuse_server_args(server_args)
    except VTokenError as error:
        refuse(error)


def _check_trace(path: str | None) -> None:
    """Raise ConfigError unless the trace file can be appended to, before anything is loaded."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        rule = f"must be a file that can be written ({error.strerror})"
        raise ConfigError("--vtoken-trace", rule, path) from error


def refuse_unsupported_arguments(_result: None, server_args: Any) -> None:
    """AFTER `ServerArgs.check_server_args`: refuse modes that would be half-served."""
    from vtoken_sglang.policy.registry import require_policy

    config = from_environment()
    if config is None:
        return
    try:
        refuse_server_args(server_args)
        config.validate_for_page_size(_resolved_page_size(server_args))
        require_policy(config, config.observe_layers, flag_label)
    except VTokenError as error:
        refuse(error)


def _prefer_our_backend(server_args: Any) -> None:
    """On CUDA, name flashinfer where the user named no backend: SGLang would pick one by the GPU's
    generation that cannot read scattered slots. The arguments are not resolved yet."""
    import torch

    named = any(getattr(server_args, field) is not None for field in BACKEND_FIELDS)
    if not named and server_args.device in (None, "cuda") and torch.cuda.is_available():
        server_args.attention_backend = "flashinfer"


def _resolved_page_size(server_args: Any) -> int:
    from sglang.srt.arg_groups.overrides import resolving_view

    return int(resolving_view(server_args).page_size or 1)


def check_attestation(scheduler_infos: list[dict[str, Any]], *_args: Any, **_kwargs: Any) -> None:
    """AFTER `_wait_for_scheduler_ready`: every scheduler must have attested our config."""
    config = from_environment()
    if config is None:
        return
    expected = expected_attestation(config)
    for rank, info in enumerate(scheduler_infos):
        got = info.get(ATTESTATION_KEY)
        if got != expected:
            problem = "did not load the plugin" if got is None else f"attested {got}"
            refuse(
                HookError(
                    "handshake",
                    f"scheduler {rank} {problem}",
                    "check SGLANG_PLUGINS and that every process uses the same environment",
                )
            )


def forward_attestation(info: dict[str, Any], controller: Any) -> dict[str, Any]:
    """AFTER `DataParallelController.get_init_info`: forward what all schedulers attested."""
    attestations = [i.get(ATTESTATION_KEY) for i in controller._scheduler_init_infos]
    if attestations and all(a == attestations[0] for a in attestations):
        info[ATTESTATION_KEY] = attestations[0]
    return info


def validate_request(tokenized: Any, manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER `TokenizerManager._create_tokenized_object`: refuse malformed per-request options.

    Raises ConfigError (a ValueError), which SGLang's HTTP layer turns into status 400.
    """
    config = from_environment()
    parameters = getattr(tokenized, "sampling_params", None)
    if config is None or parameters is None or not hasattr(tokenized, "return_logprob"):
        return
    from vtoken_sglang.policy.registry import require_policy

    custom = parameters.custom_params
    if custom is not None and not isinstance(custom, dict):
        raise ConfigError("custom_params", "must be an object", custom)
    options = RequestOptions.resolve(
        config,
        (custom or {}).get("vtoken"),
        page_size=_resolved_page_size(manager.server_args),
    )
    require_policy(options, config.observe_layers, request_label)
    refuse_request(
        options.prunes,
        tokenized.return_logprob,
        tokenized.logprob_start_len,
        prompt_len=_prompt_len(tokenized),
        beam_width=getattr(parameters, "beam_width", None),
    )


def _prompt_len(tokenized: Any) -> int | None:
    """Tokens of the whole prompt; None where they are not known here: a turn of a session goes on
    from tokens that only the scheduler has."""
    if tokenized.input_ids is None or getattr(tokenized, "session_params", None) is not None:
        return None
    return len(tokenized.input_ids)
