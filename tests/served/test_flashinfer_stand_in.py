"""Real servers whose attention is our flashinfer backend, on FlashInfer's stand-in.

SGLang's own scheduler makes the batches: chunked and mixed prefill, prefix hits, overlap, decode
of many lengths at once. The answers must equal transformers with the same tokens masked out.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.masked_reference import evictions_of, masked_continuation, read_trace
from tests.helpers.reference import Reference
from tests.helpers.server import PRODUCT, ServerProcess
from tests.helpers.server_log import complaints
from tests.served.comparisons import LOGPROB_TOLERANCE
from tests.served.configurations import POOL_FLAGS, STRICT_CHECKS, Configuration
from tests.served.mix import Mix, run_mix
from tests.served.pruned_mix import build_pruned_mix, long_case

pytestmark = [pytest.mark.server, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = ROOT / "tests" / "helpers" / "flashinfer_on_cpu"
SERVED = "served by the flashinfer backend on its stand-in"
BUSY = Configuration(16, radix=True, chunked=True, overlap=True)
TOKENWISE = Configuration(1, radix=False, chunked=True, overlap=False)


@pytest.mark.parametrize(
    ("configuration", "mixed"), [(BUSY, True), (TOKENWISE, False)], ids=["mixed", "tokenwise"]
)
def test_answers_equal_transformers_with_the_same_tokens_masked(
    configuration: Configuration,
    mixed: bool,
    model_path: Path,
    reference: Reference,
    tmp_path: Path,
) -> None:
    def encode(text: str) -> list[int]:
        return list(reference.tokenizer.encode(text, add_special_tokens=False))

    mix, long = build_pruned_mix(encode), long_case(encode)
    trace, log = tmp_path / "trace.jsonl", tmp_path / "server.log"
    flags = ["--model-path", str(model_path), *POOL_FLAGS, *configuration.flags()]
    flags += ["--vtoken-policy", "streaming_llm", "--vtoken-keep", "1.0", "--vtoken-check"]
    flags += ["--vtoken-trace", str(trace)]
    flags += ["--enable-mixed-chunk"] if mixed else []
    path = os.pathsep.join([str(ON_CPU), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**STRICT_CHECKS, "PYTHONPATH": path.rstrip(os.pathsep)}
    with ServerProcess(flags, log=log, entry=PRODUCT, environment=environment) as server:
        answers = run_mix(server, mix) | run_mix(server, Mix([long], [], [], []))
        (state,) = server.get("/server_info").json()["internal_states"]
    assert SERVED in log.read_text("utf-8")
    assert state["vtoken"]["evicted_tokens"] > 1000
    assert (state["vtoken"]["moved_tokens"] > 0) == (configuration.page_size > 1)

    evicted, lines = read_trace(trace), []
    for case in [*mix.cases(), long]:
        answer = answers[case.name]
        evictions = evictions_of(evicted.get(case.name, []))
        best = masked_continuation(reference, case.prompt, answer.tokens, evictions)
        if answer.tokens != best.tokens:
            lines.append(f"{case.name}: {answer.tokens} != {best.tokens}, gaps {best.margins}")
            continue
        error = max(abs(a - b) for a, b in zip(answer.logprobs, best.logprobs, strict=True))
        if error > LOGPROB_TOLERANCE:
            lines.append(f"{case.name}: log-probabilities differ by up to {error:.2e}")
    assert lines == []
    assert complaints(log.read_text("utf-8")) == []
