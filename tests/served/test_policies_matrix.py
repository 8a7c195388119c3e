"""Kept sets against the plain model over page sizes, caches, chunks, overlap and settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from vtoken_sglang_eval.eager_attention import EagerReference
from vtoken_sglang_eval.policy_reference import SCORES, Observed

from tests.helpers.reference import Reference
from tests.helpers.server_log import complaints
from tests.served.configurations import Configuration
from tests.served.mix import Case
from tests.served.policy_runs import (
    PolicyRun,
    check_evictions,
    observe,
    policy_case,
    serve_policies,
)
from tests.served.pruned_mix import long_text

pytestmark = [pytest.mark.server, pytest.mark.slow]

PLAIN = Configuration(16, radix=False, chunked=False, overlap=False)
BUSY = Configuration(16, radix=True, chunked=True, overlap=True)
TOKENWISE = Configuration(1, radix=True, chunked=True, overlap=True)
WIDE = Configuration(64, radix=True, chunked=True, overlap=False)
LAYERS = 30  # of the test model
OBSERVING = ("h2o", "scissorhands", "snapkv", "tova")


@dataclass(frozen=True, slots=True)
class Setting:
    """One server: how it runs, what it observes, and what its requests ask for."""

    name: str
    configuration: Configuration
    observe_layers: str = "all"
    observe_every: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name

    def layers(self) -> list[int]:
        step = {"all": 1, "last": LAYERS, "every:4": 4}[self.observe_layers]
        return sorted(range(LAYERS - 1, -1, -step))


SETTINGS = [
    Setting("private prompts", BUSY, options=(("publish", "never"),)),
    Setting("plain", PLAIN),
    Setting("page of one", TOKENWISE),
    Setting("page of 64", WIDE),
    Setting("last layer", BUSY, "last"),
    Setting("each 4th layer", PLAIN, "every:4"),
    Setting("each 3rd query", BUSY, "all", 3),
    Setting("forks", BUSY, options=(("shared", "cow"),)),
]


@pytest.fixture(scope="module")
def text(reference: Reference) -> list[int]:
    return long_text(lambda words: reference.tokenizer.encode(words, add_special_tokens=False))


@pytest.fixture(scope="module")
def eager(model_path: Path) -> EagerReference:
    return EagerReference.load(model_path)


def cases_of(setting: Setting, text: list[int]) -> list[Case]:
    """One request per policy; that of scissorhands reaches into a second block of its history."""
    lengths = {name: 150 + 7 * at for at, name in enumerate(sorted(SCORES))}
    lengths["scissorhands"] = 520
    options = dict(setting.options)
    return [
        policy_case(name, (text[17 * at :] + text)[: lengths[name]], 36, name, **options)
        for at, name in enumerate(sorted(SCORES))
    ]


def gathered(policy: str, first: Observed, length: int) -> Tensor:
    """What a request had gathered on its first 112 tokens at this length, float64."""
    if policy == "scissorhands":
        return -SCORES[policy](first, length)[:112]
    return first.mean()[first.queries(0, length), :112].sum(dim=0)


def test_a_cached_prefix_starts_from_what_the_last_to_compute_it_gathered(
    model_path: Path, text: list[int], eager: EagerReference, tmp_path: Path
) -> None:
    cases = {}
    for at, policy in enumerate(("h2o", "scissorhands")):
        prefix = text[230 + 400 * at :][:112]
        for kind, ending in (("first", 0), ("on", 60), ("off", 160)):
            seeds = "off" if kind == "off" else "on"
            prompt = [*prefix, *text[ending : ending + 35]]
            name = f"{policy} {kind}"
            cases[name] = policy_case(name, prompt, 24, policy, reuse_prefix_scores=seeds)
    run = serve_policies(BUSY, list(cases.values()), model_path, tmp_path)
    for policy in ("h2o", "scissorhands"):
        first = observe(eager, cases[f"{policy} first"], run, chunk=64)
        # Kept when the prompt had reached the cache, which is when it is first looked at.
        seed = gathered(policy, first, run.trace[f"{policy} first"][0].logical_len)
        for kind in ("on", "off"):
            case = cases[f"{policy} {kind}"]
            assert run.answers[case.name].cached == 112
            started = seed if kind == "on" else None
            lines = check_evictions(eager, case, run, page_size=16, chunk=64, seed=started)
            assert lines == [], case.name
            other = None if kind == "on" else seed
            wrong = check_evictions(eager, case, run, page_size=16, chunk=64, seed=other)
            assert wrong != [], f"{case.name}: the seed changes nothing here"
    assert complaints(run.log) == []


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_kept_sets_are_the_plain_models(
    model_path: Path,
    text: list[int],
    eager: EagerReference,
    tmp_path: Path,
    setting: Setting,
) -> None:
    configuration = setting.configuration
    cases = cases_of(setting, text)
    flags = ("--vtoken-observe-layers", setting.observe_layers)
    flags += ("--vtoken-observe-every", str(setting.observe_every))
    run = serve_policies(configuration, cases, model_path, tmp_path, *flags)
    assert [line for case in cases for line in check(eager, case, run, setting)] == []
    assert complaints(run.log) == []


def check(eager: EagerReference, case: Case, run: PolicyRun, setting: Setting) -> list[str]:
    return check_evictions(
        eager,
        case,
        run,
        page_size=setting.configuration.page_size,
        chunk=64 if setting.configuration.chunked else None,
        layers=setting.layers(),
        every=setting.observe_every,
    )
