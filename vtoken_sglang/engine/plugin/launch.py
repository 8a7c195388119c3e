"""What the launching process does with the flags, the server's arguments and each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vtoken_sglang.engine.compat.arguments import BACKEND_FIELDS, refuse_server_args
from vtoken_sglang.engine.compat.requests import refuse_request
from vtoken_sglang.engine.plugin.attestation import ATTESTATION_KEY, expected_attestation
from vtoken_sglang.engine.plugin.installation import verify_installation
from vtoken_sglang.errors import ConfigError, HookError
from vtoken_sglang.option_flags import from_namespace
from vtoken_sglang.option_values import flag_label, request_label
from vtoken_sglang.options import RequestOptions, from_environment, to_environment
from vtoken_sglang.policy.names import check_installed

if TYPE_CHECKING:
    import argparse

    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs


def activate(server_args: ServerArgs, arguments: argparse.Namespace) -> None:
    """Freeze the options and hand them to child processes, if the server was asked for any.

    The environment is the only channel that reaches every spawned process before SGLang
    publishes its arguments there. Runs before any model file is opened. Modes that the raw flags
    already name are refused here, since SGLang may stop or branch off before its own checks.

    Raises:
        ConfigError, HookError, UnsupportedModeError: the user is told.
    """
    config = from_namespace(arguments) or from_environment()
    if config is None:
        return
    check_installed(config.policy, flag_label("policy"))
    _check_trace(config.trace)
    to_environment(config)
    verify_installation()
    prefer_our_backend(server_args)
    refuse_server_args(server_args)


def check_arguments(server_args: ServerArgs) -> None:
    """Refuse modes that would be half-served, once SGLang has resolved its arguments.

    Raises:
        ConfigError, UnsupportedModeError: the user is told.
    """
    from vtoken_sglang.policy.registry import require_policy

    config = from_environment()
    if config is not None:
        refuse_server_args(server_args)
        config.validate_for_page_size(_resolved_page_size(server_args))
        require_policy(config, config.observe_layers, flag_label)


def check_attestations(scheduler_infos: list[dict[str, Any]]) -> None:
    """Raise HookError unless the ready message of every scheduler attests our config."""
    config = from_environment()
    if config is None:
        return
    expected = expected_attestation(config)
    for rank, info in enumerate(scheduler_infos):
        got = info.get(ATTESTATION_KEY)
        if got != expected:
            problem = "did not load the plugin" if got is None else f"attested {got}"
            raise HookError(
                "check_attestation",
                f"scheduler {rank} {problem}",
                "check SGLANG_PLUGINS and that every process uses the same environment",
            )


def check_request(tokenized: Any, manager: TokenizerManager) -> None:
    """Raise ConfigError for a malformed option of a request, or for one that cannot be served.
    `tokenized`: what SGLang made of its body, of whatever kind it is."""
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


def prefer_our_backend(server_args: ServerArgs) -> None:
    """On CUDA, name flashinfer where the user named no backend: SGLang would pick one by the GPU's
    generation that cannot read scattered slots. The arguments are not resolved yet."""
    import torch

    named = any(getattr(server_args, field) is not None for field in BACKEND_FIELDS)
    if not named and server_args.device in (None, "cuda") and torch.cuda.is_available():
        server_args.attention_backend = "flashinfer"


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


def _resolved_page_size(server_args: ServerArgs) -> int:
    from sglang.srt.arg_groups.overrides import resolving_view

    return int(resolving_view(server_args).page_size or 1)


def _prompt_len(tokenized: Any) -> int | None:
    """Tokens of the whole prompt; None where they are not known here: a turn of a session goes on
    from tokens that only the scheduler has."""
    if tokenized.input_ids is None or getattr(tokenized, "session_params", None) is not None:
        return None
    return len(tokenized.input_ids)
