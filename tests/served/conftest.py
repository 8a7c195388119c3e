"""Session fixtures of the served tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.reference import Reference
from tests.helpers.server import ServerProcess
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS
from tests.served.mix import Answer, Mix, build_mix, run_mix


@pytest.fixture(scope="session")
def mix(reference: Reference) -> Mix:
    tokenizer = reference.tokenizer

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def chat(message: str) -> list[int]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return encode(text)

    return build_mix(encode, chat)


@dataclass(frozen=True, slots=True)
class StockRun:
    """The mix's answers by case name, and what /server_info says."""

    answers: dict[str, Answer]
    info: dict[str, Any]


@pytest.fixture(scope="session")
def stock(model_path: Path, mix: Mix, tmp_path_factory: pytest.TempPathFactory) -> StockRun:
    """The mix answered by SGLang as released, the plugin installed but not asked for."""
    folder = tmp_path_factory.mktemp("stock")
    flags = ["--model-path", str(model_path), *POOL_FLAGS]
    with ServerProcess(flags, log=folder / "server.log", environment=STRICT_CHECKS) as server:
        answers = run_mix(server, mix)
        info = server.get("/server_info").json()
    return StockRun(answers, info)


@pytest.fixture(scope="session")
def stock_answers(stock: StockRun) -> dict[str, Answer]:
    return stock.answers
