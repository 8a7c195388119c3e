"""What one request must not ask for."""

from __future__ import annotations

import pytest

from vtoken_sglang.engine.compat.requests import refuse_request
from vtoken_sglang.errors import ConfigError


@pytest.mark.parametrize(
    ("prunes", "return_logprob", "start", "prompt_len"),
    [
        (True, False, -1, None),
        (True, False, 0, None),  # SGLang ignores the start without return_logprob
        (True, True, -1, 10),
        (True, True, None, None),
        (True, True, 10, 10),
        (False, True, 0, 10),
    ],
)
def test_request_passes(
    prunes: bool, return_logprob: bool, start: int | None, prompt_len: int | None
) -> None:
    refuse_request(prunes, return_logprob, start, prompt_len=prompt_len, beam_width=1)


@pytest.mark.parametrize(
    ("start", "prompt_len"), [(0, None), (0, 10), (9, 10), (10, None), (-2, 10)]
)
def test_prompt_logprobs_of_a_pruned_request_are_refused(
    start: int, prompt_len: int | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_request(True, True, start, prompt_len=prompt_len)
    assert (caught.value.field, caught.value.value) == ("logprob_start_len", start)
    assert "pruned prefix" in str(caught.value)


@pytest.mark.parametrize("prunes", [True, False])
def test_beam_search_is_refused(prunes: bool) -> None:
    with pytest.raises(ConfigError, match="beam_width: must be 1.* got 4"):
        refuse_request(prunes, False, -1, beam_width=4)
