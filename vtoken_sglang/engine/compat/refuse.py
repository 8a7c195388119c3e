"""Refuse by name every mode that would be half-served.

Three moments, one error type. `refuse_server_args` needs no model: call it as soon as the command
line is parsed (SGLang itself would stop some modes a moment later, without saying what we need),
and again once SGLang has resolved its arguments, when its own choices and the model's config are
known. `refuse_runtime` looks at the objects that were really built. `refuse_request` looks at one
request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from vtoken_sglang.engine.compat.built import backend_hits, runner_hits, tree_hits
from vtoken_sglang.engine.compat.models import LAYER_RULES, MODEL_RULES, PLAIN_MODEL, model_hits
from vtoken_sglang.engine.compat.rule import ArgsView, Hit, UnsupportedModesError, required
from vtoken_sglang.engine.compat.rules import ALLOWED, FLAG_RULES
from vtoken_sglang.errors import ConfigError

REQUEST_ROWS = (
    (
        "per request: `logprob_start_len` >= 0 with `return_logprob` (OpenAI: `echo`)",
        "prompt log-probabilities would be computed over a pruned prefix",
        'send custom_params {"vtoken": {"policy": "none"}} with that request',
    ),
    (
        "per request: `beam_width` > 1",
        "beams share slots between rows",
        "use `n` for several independent samples",
    ),
)
"""What `refuse_request` refuses, for the table."""


class Prunes(Protocol):
    """Anything that says whether a request is pruned."""

    @property
    def prunes(self) -> bool: ...


def refuse_server_args(server_args: Any) -> None:
    """Refuse a ServerArgs, resolved or not.

    On an unresolved one, rules on what SGLang would choose and on the model stay silent.

    Raises:
        UnsupportedModesError: one line for each refused mode, with flag, reason and remedy.
        HookError: an argument that a rule reads does not exist in this SGLang.
    """
    _raise_if_any(server_args_hits(server_args))


def server_args_hits(server_args: Any) -> tuple[Hit, ...]:
    """Every refused mode of a ServerArgs; empty when it can be served. Raises HookError."""
    args = ArgsView(server_args)
    hits = []
    for rule in FLAG_RULES:
        flag = rule.trigger.find(args)
        if flag is not None:
            hits.append(Hit(rule=rule.name, flag=flag, reason=rule.reason, remedy=rule.remedy))
    config = args.model_config()
    return tuple(hits) + (() if config is None else model_hits(config))


def refuse_model_runner(runner: Any) -> None:
    """Refuse a model runner whose model is loaded and whose pools are allocated.

    Raises:
        UnsupportedModesError: its model, layers, KV pool, allocator or rows are not plain.
        HookError: an attribute that is checked does not exist in this SGLang.
    """
    _raise_if_any(model_hits(required(runner, "model_config")) + runner_hits(runner))


def refuse_runtime(scheduler: Any) -> None:
    """Refuse a fully built scheduler: its arguments, model runner, backends and prefix cache.

    Raises:
        UnsupportedModesError, HookError: as `refuse_server_args` and `refuse_model_runner`.
    """
    runner = required(required(scheduler, "tp_worker"), "model_runner")
    _raise_if_any(
        server_args_hits(required(scheduler, "server_args"))
        + runner_hits(runner)
        + backend_hits(runner)
        + tree_hits(required(scheduler, "tree_cache"))
    )


def refuse_request(
    options: Prunes,
    return_logprob: bool,
    logprob_start_len: int | None,
    *,
    prompt_len: int | None = None,
    beam_width: int | None = None,
) -> None:
    """Refuse what one request must not ask for.

    Args:
        options: the request's resolved options.
        return_logprob, logprob_start_len: as in SGLang's request; None and -1 mean that only
            output tokens get log-probabilities, otherwise prompt tokens from that position on
            (from the first one for any other negative number).
        prompt_len: tokens in the prompt, where known; a start at or past it asks for none of them.
        beam_width: as in SGLang's sampling parameters; None and 1 mean no beam search.

    Raises:
        ConfigError: the field, the rule and the value.
    """
    if beam_width is not None and beam_width > 1:
        # Refused for every request: a slot shared by two rows would be freed or moved twice.
        raise ConfigError("beam_width", "must be 1, beams share slots between rows", beam_width)
    start = -1 if logprob_start_len is None else logprob_start_len
    asked = return_logprob and start != -1 and (prompt_len is None or start < prompt_len)
    if asked and options.prunes:
        rule = (
            "must be -1 in a pruned request, since prompt log-probabilities would be computed "
            'over a pruned prefix (for them, send custom_params {"vtoken": {"policy": "none"}})'
        )
        raise ConfigError("logprob_start_len", rule, start)


def describe_rules() -> str:
    """The refused modes and those let through on purpose, as two Markdown tables."""
    refused = [("asked for by", "refused because", "do instead")]
    refused += [(_code(rule.flag), rule.reason, rule.remedy) for rule in FLAG_RULES]
    refused += [(_model(rule.kind), rule.reason, rule.remedy) for rule in MODEL_RULES]
    refused += [(_model(rule.kind), rule.reason, PLAIN_MODEL) for rule in LAYER_RULES]
    refused += REQUEST_ROWS
    allowed = [("let through", "because")]
    allowed += [(_code(entry.flag), entry.why) for entry in ALLOWED]
    return _table(refused) + "\n" + _table(allowed)


def _model(kind: str) -> str:
    return f"`--model-path`: {kind}"


def _code(text: str) -> str:
    words = (word if word[:2] != "--" else f"`{word}`" for word in text.replace(",", " ,").split())
    return " ".join(words).replace(" ,", ",")


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def _raise_if_any(hits: tuple[Hit, ...]) -> None:
    if hits:
        raise UnsupportedModesError(hits)
