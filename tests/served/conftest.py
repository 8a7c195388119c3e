"""Session fixtures of the served tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.reference import Reference
from tests.helpers.server import ServerProcess
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS
from tests.served.mix import Answer, Mix, build_mix, run_mix


@pytest.fixture(scope="session")
def mix(reference: Reference) -> Mix:
    tokenizer = reference.tokenizer

    def chat(message: str) -> list[int]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        return list(tokenizer.encode(text, add_special_tokens=False))

    return build_mix(lambda text: list(tokenizer.encode(text, add_special_tokens=False)), chat)


@pytest.fixture(scope="session")
def stock_answers(
    model_path: Path, mix: Mix, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answer]:
    """The mix answered by SGLang as it is, plugin installed but not asked for."""
    log = tmp_path_factory.mktemp("stock") / "server.log"
    flags = ["--model-path", str(model_path), *POOL_FLAGS]
    with ServerProcess(flags, log=log, environment=STRICT_CHECKS) as server:
        return run_mix(server, mix)
