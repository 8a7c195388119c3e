"""What a single request must not ask for."""

from __future__ import annotations

from vtoken_sglang.errors import ConfigError


def refuse_request(
    prunes: bool,
    return_logprob: bool,
    logprob_start_len: int | None,
    *,
    prompt_len: int | None = None,
    beam_width: int | None = None,
) -> None:
    """Refuse what one request must not ask for.

    Args:
        prunes: whether the request is pruned.
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
        rule = "must be 1, beams share slots between rows (use `n` for independent samples)"
        raise ConfigError("beam_width", rule, beam_width)
    start = -1 if logprob_start_len is None else logprob_start_len
    asked = return_logprob and start != -1 and (prompt_len is None or start < prompt_len)
    if asked and prunes:
        rule = (
            "must be -1 in a pruned request, since prompt log-probabilities would be computed "
            'over a pruned prefix (for them, send custom_params {"vtoken": {"policy": "none"}})'
        )
        raise ConfigError("logprob_start_len", rule, start)
