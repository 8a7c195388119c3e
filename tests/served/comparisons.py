"""Comparing answers; each function returns what differs as lines, empty when nothing does."""

from __future__ import annotations

from collections.abc import Mapping

from tests.helpers.reference import Reference
from tests.served.mix import Answer, Case, expected_names

LOGPROB_TOLERANCE = 1e-4


def against_transformers(
    case: Case, answers: Mapping[str, Answer], reference: Reference
) -> list[str]:
    """Compare all answers to one exact case with transformers' greedy continuation."""
    lines = []
    for name in expected_names(case):
        answer = answers[name]
        if answer.finish == "length" and len(answer.tokens) != case.count:
            lines.append(f"{name}: {len(answer.tokens)} tokens, asked for {case.count}")
        best = reference.best_continuation(case.prompt, answer.tokens)
        lines += _differences(name, answer, best.tokens, best.logprobs, best.margins)
    return lines


def against_answers(expected: Mapping[str, Answer], got: Mapping[str, Answer]) -> list[str]:
    """Compare every answer of one run with that of another: tokens, log-probabilities, text."""
    lines = [f"{name}: answered by one run only" for name in sorted(expected.keys() ^ got.keys())]
    for name in expected.keys() & got.keys():
        want, have = expected[name], got[name]
        lines += _differences(name, have, want.tokens, want.logprobs, [])
        if want.text != have.text or want.finish != have.finish:
            lines.append(
                f"{name}: {have.finish} {have.text!r}, expected {want.finish} {want.text!r}"
            )
        if len(want.input_logprobs) != len(have.input_logprobs) or any(
            abs(a - b) > LOGPROB_TOLERANCE
            for a, b in zip(want.input_logprobs, have.input_logprobs, strict=False)
        ):
            lines.append(f"{name}: log-probabilities of the prompt differ")
    return lines


def _differences(
    name: str, answer: Answer, tokens: list[int], logprobs: list[float], margins: list[float]
) -> list[str]:
    if answer.tokens != tokens:
        pairs = zip(answer.tokens, tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(tokens))
        gap = f", the two best are {margins[at]:.2e} apart" if at < len(margins) else ""
        return [f"{name}: differs from token {at} on{gap}: {answer.tokens} != {tokens}"]
    errors = [abs(a - b) for a, b in zip(answer.logprobs, logprobs, strict=True)]
    if max(errors, default=0.0) > LOGPROB_TOLERANCE:
        return [f"{name}: log-probabilities differ by up to {max(errors):.2e}"]
    return []
