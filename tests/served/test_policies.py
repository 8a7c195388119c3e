"""The served engine evictions exactly the tokens that the plain model's attention says must go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.eager_attention import EagerReference
from vtoken_sglang_eval.policy_reference import SCORES

from tests.helpers.installed_package import install_into
from tests.helpers.masked_reference import evictions_of, masked_continuation
from tests.helpers.reference import Reference
from tests.helpers.server_log import complaints
from tests.served.configurations import Configuration
from tests.served.mix import Case
from tests.served.policy_runs import PolicyRun, check_evictions, policy_case, serve_policies
from tests.served.pruned_mix import long_text

pytestmark = pytest.mark.server

BUSY = Configuration(16, radix=True, chunked=True, overlap=True)
THIRD_PARTY = "every_other"


@pytest.fixture(scope="module")
def cases(reference: Reference) -> dict[str, Case]:
    """One request per policy, no two with a common prefix."""
    text = long_text(lambda words: reference.tokenizer.encode(words, add_special_tokens=False))
    found = {
        name: policy_case(name, (text[17 * at :] + text)[: 150 + 7 * at], 36, name)
        for at, name in enumerate(sorted(SCORES))
    }
    found[THIRD_PARTY] = policy_case(THIRD_PARTY, text[200:290], 24, THIRD_PARTY, keep=0.75)
    return found


# Wrong from the second look on, so that its request has lost tokens and moved pages by then.
FAILING = """
from vtoken_sglang.policy.base import Policy

class Failing(Policy):
    calls = 0

    def score(self, view):
        self.calls += 1
        scores = view.positions.float()
        if self.calls > 1:
            raise LookupError("no such layer")
        return scores

class NotFinite(Policy):
    def score(self, view):
        return view.positions.float() / 0
"""
FAILING_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "failing-policies"
version = "0.1.0"
[project.entry-points."vtoken_sglang.policies"]
failing = "failing_policies:Failing"
not_finite = "failing_policies:NotFinite"
[tool.setuptools]
py-modules = ["failing_policies"]
"""
FAILURES = {
    "failing": ("policy Failing: scores must be computed without an error", "no such layer"),
    "not_finite": ("policy NotFinite: scores must be finite", "that are not"),
}


def failing_policies(folder: Path) -> Path:
    """A distribution whose policies fail while they serve."""
    source = folder / "failing"
    source.mkdir()
    (source / "pyproject.toml").write_text(FAILING_PROJECT)
    (source / "failing_policies.py").write_text(FAILING)
    return source


@pytest.fixture(scope="module")
def run(
    model_path: Path, cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory
) -> PolicyRun:
    folder = tmp_path_factory.mktemp("policies")
    source = Path(__file__).resolve().parents[1] / "third_party_policy"
    sources = [source, failing_policies(folder)]
    sites = [install_into(each, tmp_path_factory.mktemp("third-party")) for each in sources]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, sites))}
    return serve_policies(
        BUSY, [*cases.values()], model_path, folder, environment=environment, posts=posts()
    )


def openai(path: str, name: str, options: object) -> tuple[str, dict[str, Any]]:
    """A request to an OpenAI-compatible endpoint with options of its own; its id is its name."""
    words = "Tell a long story about a lighthouse, the sea and a clock that ran backwards. " * 3
    body: dict[str, Any] = {"model": "default", "max_tokens": 40, "ignore_eos": True, "rid": name}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": words}]
    else:
        body["prompt"] = words
    return path, {**body, "temperature": 0, "custom_params": {"vtoken": options}}


PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
REFUSED: list[tuple[object, str, str]] = [
    ({"polciy": "h2o"}, "vtoken.polciy: is not an option", "h2o"),
    ({"keep": "half"}, "vtoken.keep: must be of type float", "half"),
    ({"keep": 1.5}, "vtoken.keep: must be above 0.0 and at most 1.0", "1.5"),
    ({"policy": "h3o"}, "vtoken.policy: must be an installed policy", "h3o"),
    (
        {"reuse_prefix_scores": "maybe"},
        "vtoken.reuse_prefix_scores: must be one of on, off",
        "maybe",
    ),
    ({"observe_every": 2}, "vtoken.observe_every: is not an option", "2"),
]


def posts() -> dict[str, tuple[str, Any]]:
    options = {"policy": "h2o", "keep": 0.5, "recent": 16, "interval": 8}
    good = {f"good {kind}": openai(path, f"good {kind}", options) for kind, path in PATHS.items()}
    bad = {
        f"bad {kind} {index}": openai(path, f"bad {kind} {index}", refused)
        for kind, path in PATHS.items()
        for index, (refused, _, _) in enumerate(REFUSED)
    }
    text = " ".join(f"{number}." for number in range(80))
    failing = {
        name: (
            "/generate",
            {
                "text": text,
                "rid": name,
                "sampling_params": {
                    "temperature": 0, "max_new_tokens": 60, "ignore_eos": True,
                    "custom_params": {"vtoken": {**options, "policy": name}},
                },
            },
        )
        for name in FAILURES
    }  # fmt: skip
    return failing | good | bad  # those that fail first: the others show that the server goes on


@pytest.fixture(scope="module")
def eager(model_path: Path) -> EagerReference:
    return EagerReference.load(model_path)


@pytest.mark.parametrize("name", sorted(SCORES))
def test_kept_sets_are_the_plain_models(
    run: PolicyRun, cases: dict[str, Case], eager: EagerReference, name: str
) -> None:
    assert check_evictions(eager, cases[name], run, page_size=16, chunk=64) == []
    assert len(run.trace[name]) >= 4


def test_answers_equal_transformers_with_the_evicted_tokens_masked(
    run: PolicyRun, cases: dict[str, Case], reference: Reference
) -> None:
    for name, case in cases.items():
        answer = run.answers[name]
        best = masked_continuation(
            reference, case.prompt, answer.tokens, evictions_of(run.trace[name])
        )
        assert answer.tokens == best.tokens, name


def test_a_third_partys_policy_is_served_without_touching_the_project(run: PolicyRun) -> None:
    evicted = [pos for eviction in run.trace[THIRD_PARTY] for pos in eviction.evicted]
    assert evicted
    assert all(pos % 2 for pos in run.trace[THIRD_PARTY][0].evicted)


@pytest.mark.parametrize("kind", PATHS)
def test_a_request_chooses_its_policy_through_the_openai_endpoints(
    run: PolicyRun, kind: str
) -> None:
    status, body = run.responses[f"good {kind}"]
    assert status == 200, body
    trace = run.trace[f"good {kind}"]
    assert sum(len(eviction.evicted) for eviction in trace) > 20
    # The server's own policy, streaming_llm, would have taken the oldest behind the sinks.
    first = list(trace[0].evicted)
    assert first != list(range(4, 4 + len(first)))


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_bad_options_are_refused_by_field_rule_and_value(
    run: PolicyRun, kind: str, index: int
) -> None:
    _, rule, value = REFUSED[index]
    status, body = run.responses[f"bad {kind} {index}"]
    assert status == 400, body
    assert rule in body
    assert value in body
    assert f"bad {kind} {index}" not in run.trace


@pytest.mark.parametrize("name", FAILURES)
def test_a_policy_that_fails_ends_its_request_alone(run: PolicyRun, name: str) -> None:
    status, body = run.responses[name]
    assert status == 500, body
    assert all(part in body for part in FAILURES[name]), body
    assert len(run.trace.get(name, [])) == (1 if name == "failing" else 0)
    assert f"request {name} was ended: policy" in run.log
    assert run.state["policy_errors"] == len(FAILURES)


def test_nothing_is_left_and_no_checker_complained(run: PolicyRun) -> None:
    left = ("pruned_rows", "held_pages", "retained_pages", "live_private_tokens")
    assert {name: run.state[name] for name in left} == dict.fromkeys(left, 0)
    # Every failure is told once, with its traceback up to the last error, and answered with 500;
    # nothing else is wrong.
    log = run.log
    for name in FAILURES:
        before, told, after = log.partition(f"request {name} was ended: policy")
        assert told
        _, error, after = after.partition("policy.base.PolicyError: policy")
        assert error
        log = before.rpartition("\n")[0] + "\n" + after.partition("\n")[2]
    found = [line.rpartition('" ')[2] for line in complaints(log)]
    assert found == ["500 Internal Server Error"] * len(FAILURES)
