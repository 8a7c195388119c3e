"""Workload `generated_shared_prefix`: SGLang's own serving benchmark, unmodified, as the client.

`python -m sglang.benchmark.serving --dataset-name generated-shared-prefix` is started against the
arm's server, and its output file is read back into the records that every other workload gives.
Groups are `conversations / sharing`, prompts per group `sharing`; `system_tokens`, `user_tokens`
and `out_tokens` are the lengths of prefix, question and answer. It does not report token ids, so
answers of two arms cannot be compared here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .chat import ChatTokenizer
from .client import RequestRecord
from .config import EvalConfig
from .errors import ConfigError, ServerError
from .sharegpt import Dataset
from .workload import BenchPlan, Session, Workload, sharing_degree

TIMEOUT_S = 3600.0
LOG_LINES = 15


def build(config: EvalConfig, dataset: Dataset, tokenizer: ChatTokenizer) -> Workload:
    """Plan the client's run. Sessions stand for its requests by their lengths only.

    Raises:
        ConfigError: `conversations` is no multiple of the sharing degree.
    """
    degree = sharing_degree(config)
    if config.conversations % degree:
        raise ConfigError("conversations", f"must be a multiple of sharing {degree}", degree)
    plan = BenchPlan(
        groups=config.conversations // degree,
        prompts_per_group=degree,
        prefix_tokens=config.system_tokens,
        question_tokens=config.user_tokens,
        answer_tokens=config.out_tokens,
        concurrency=config.concurrency,
        seed=config.seed,
        model=config.model,
    )
    # Ids 100, 101, ...: whatever they mean, they are only sent in the warm-up.
    prompt = tuple(100 + at % 400 for at in range(config.system_tokens + config.user_tokens))
    sessions = tuple(
        Session(
            session=index,
            lane=index % config.concurrency,
            first_prompt=prompt,
            later_turns=(),
            answer_tokens=(config.out_tokens,),
        )
        for index in range(config.conversations)
    )
    facts: dict[str, int | float | str] = {
        "groups": plan.groups,
        "sharing_degree": degree,
        "client": "sglang.benchmark.serving",
    }
    return Workload(name="generated_shared_prefix", sessions=sessions, facts=facts, bench=plan)


def client_command(
    plan: BenchPlan, base_url: str, options: Mapping[str, Any], out: Path
) -> list[str]:
    """The client's command line; `options` are this package's options of every request."""
    words = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
    words += ["--base-url", base_url, "--model", plan.model, "--seed", str(plan.seed)]
    words += ["--dataset-name", "generated-shared-prefix", "--warmup-requests", "0"]
    for flag, value in (
        ("num-groups", plan.groups),
        ("prompts-per-group", plan.prompts_per_group),
        ("system-prompt-len", plan.prefix_tokens),
        ("question-len", plan.question_tokens),
        ("output-len", plan.answer_tokens),
    ):
        words += [f"--gsp-{flag}", str(value)]
    words += ["--max-concurrency", str(plan.concurrency), "--disable-tqdm", "--cache-report"]
    words += ["--output-file", str(out), "--output-details"]
    if options:
        sampling = {
            "temperature": 0,
            "max_new_tokens": plan.answer_tokens,
            "ignore_eos": True,
            "custom_params": {"vtoken": dict(options)},
        }
        words += ["--extra-request-body", json.dumps({"sampling_params": sampling})]
    return words


def run_client(
    plan: BenchPlan, base_url: str, options: Mapping[str, Any], folder: Path
) -> tuple[list[RequestRecord], float]:
    """Run the client to its end; its records and the seconds that it measured.

    Raises:
        ServerError: the client failed; shows the end of its output.
    """
    stamp = time.monotonic_ns()
    out, log = folder / f"bench-{stamp}.jsonl", folder / f"bench-{stamp}.log"
    with log.open("wb") as stream:
        try:
            done = subprocess.run(
                client_command(plan, base_url, options, out),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            problem = f"the client did not end within {TIMEOUT_S:.0f} s"
            raise ServerError(problem, log_path=log.name) from error
    if done.returncode or not out.is_file():
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise ServerError(f"the client ended with status {done.returncode}", tail, log.name)
    return parse_output(json.loads(out.read_text("utf-8").splitlines()[-1]), plan)


def parse_output(result: Mapping[str, Any], plan: BenchPlan) -> tuple[list[RequestRecord], float]:
    """Records of one line of the client's output file, written with its details."""
    records = []
    columns = (result[key] for key in ("input_lens", "output_lens", "ttfts", "itls", "errors"))
    cached = result.get("cached_tokens") or [0] * len(result["ttfts"])
    for index, (asked, made, ttft, gaps, error) in enumerate(zip(*columns, strict=True)):
        if not error and made != plan.answer_tokens:
            error = f"{made} tokens came back, {plan.answer_tokens} were asked for"
        records.append(
            RequestRecord(
                session=index,
                turn=0,
                prompt_hash="",
                prompt_tokens=int(asked),
                cached_tokens=int(cached[index] or 0),
                ttft_s=float(ttft),
                latency_s=float(ttft) + sum(gaps),
                gaps_s=tuple(map(float, gaps)),
                output_tokens=int(made),
                error=str(error or ""),
            )
        )
    return records, float(result["duration"])
