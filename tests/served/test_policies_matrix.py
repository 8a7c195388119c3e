"""Kept sets against the plain model over page sizes, caches, chunks, overlap and settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.eager_attention import EagerReference
from vtoken_sglang_eval.policy_reference import SCORES

from tests.helpers.reference import Reference
from tests.helpers.server_log import complaints
from tests.served.configurations import Configuration
from tests.served.mix import Case
from tests.served.policy_runs import PolicyRun, check_kills, policy_case, serve_policies
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
    Setting("plain", PLAIN),
    Setting("page of one", TOKENWISE),
    Setting("page of 64", WIDE),
    Setting("last layer", BUSY, "last"),
    Setting("each 4th layer", PLAIN, "every:4"),
    Setting("each 3rd query", BUSY, "all", 3),
    Setting("private prompts", BUSY, options=(("publish", "never"),)),
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
    return check_kills(
        eager,
        case,
        run,
        page_size=setting.configuration.page_size,
        chunk=64 if setting.configuration.chunked else None,
        layers=setting.layers(),
        every=setting.observe_every,
    )
