"""One evaluation: every arm served once per repeat, the same requests to each, one result file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import provenance
from .arms import Arm, rotated, select_arms
from .cell import flush_cache, measure, require_answers, warm_up_workload
from .chat import ChatTokenizer, ModelTokenizer
from .client import LoadClient
from .config import EvalConfig
from .document import outline, with_runs
from .progress import Progress
from .results import write_result
from .server import HOST, ServerProcess, free_port
from .sharegpt import Dataset
from .sources import load_source
from .workload import Workload, build_workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything known before the first server starts. `config` has no "auto" left in it."""

    config: EvalConfig
    arms: tuple[Arm, ...]
    dataset: Dataset
    workload: Workload
    model: Mapping[str, Any]
    tokenizer: ChatTokenizer


def prepare(config: EvalConfig, tokenizer_model: str | None = None) -> Prepared:
    """Resolve the device, read the data and build the requests.

    Args:
        tokenizer_model: whose tokenizer builds them, if not that of the model to be served.

    Raises:
        ConfigError: a setting cannot be served (see `EvalConfig`, `build_workload`).
        DatasetError: no dataset, or too little in it.
    """
    device = provenance.resolve_device(config.device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    config = replace(config, device=device, dtype=dtype)
    dataset = load_source(config)
    tokenizer = ModelTokenizer(tokenizer_model or config.model)
    return Prepared(
        config=config,
        arms=select_arms(config.arms),
        dataset=dataset,
        workload=build_workload(config, dataset, tokenizer),
        model=provenance.model_facts(config.model, dtype, fetch=tokenizer_model is None),
        tokenizer=tokenizer,
    )


def engine_args(config: EvalConfig, port: int) -> list[str]:
    """Engine flags of every arm of an evaluation; `config.device` and `dtype` are resolved."""
    words = ["--model-path", config.model, "--host", HOST, "--port", str(port)]
    words += ["--device", config.device, "--dtype", config.dtype]
    words += ["--page-size", str(config.page_size), "--max-total-tokens", str(config.pool)]
    words += ["--random-seed", str(config.seed), "--enable-metrics", "--decode-log-interval", "10"]
    if config.device == "cpu":
        words.append("--sleep-on-idle")
    return [*words, *config.server_args]


def arm_command(config: EvalConfig, arm: Arm, port: int) -> list[str]:
    """The command of a server that serves this arm alone."""
    own = replace(config, page_size=arm.page_size or config.page_size)
    return arm.command(engine_args(own, port), own)


def server_environment(config: EvalConfig) -> dict[str, str]:
    """Environment of every server: one thread per process on a CPU, quiet tokenizers."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if config.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def arm_environment(config: EvalConfig, arm: Arm) -> dict[str, str]:
    """Environment of this arm's server. In the stock arm only the CPU platform of this package is
    loaded, without which SGLang does not run on a machine that has no accelerator."""
    environment = server_environment(config)
    return (
        environment | {"SGLANG_PLUGINS": "vtoken_cpu"} if arm.vtoken_args is None else environment
    )


def run_once(prepared: Prepared, arm: Arm, repeat: int, folder: Path, progress: Progress) -> Any:
    """Serve one arm once and return its run as plain data.

    Raises:
        ServerError: the server did not start, or ended while it was used.
    """
    config, workload = prepared.config, prepared.workload
    port = config.port or free_port()
    load_before = os.getloadavg()[0]
    label = f"repeat {repeat + 1} {arm.name}"
    command = arm_command(config, arm, port)
    server = ServerProcess(
        command,
        port,
        folder / f"server-{repeat + 1}-{arm.name}.log",
        arm_environment(config, arm),
        config.startup_timeout,
    )
    progress.begin(f"{label}: starting the server")
    with server:
        progress.stage(f"{label}: warming up")
        client = LoadClient(server.base_url, config.sample_interval)
        require_answers(server, client.run(warm_up_workload(workload)))
        flush_cache(server.base_url)
        progress.begin(f"{label}: sending {workload.requests} requests")
        found = measure(
            server,
            workload,
            arm,
            config,
            prepared.tokenizer,
            options={},
            look=any(other.prunes for other in prepared.arms),
            kv_bytes=int(prepared.model.get("kv_bytes_per_token", 0)),
            folder=folder,
            on_request=progress.request,
        )
    return {
        "arm": arm.name,
        "repeat": repeat,
        "command": provenance.portable_command(command),
        "startup_s": server.startup_s,
        "load_average_before": load_before,
        **found,
    }


def evaluate(prepared: Prepared, folder: Path, command: str, progress: Progress) -> dict[str, Any]:
    """Run every arm in every repeat and write `result.json` into `folder`.

    When interrupted or failing, the runs finished so far go to `partial.json` instead.

    Returns:
        The result.
    """
    started = datetime.now(UTC)
    # Taken now, for a checkout may move on while servers run that have loaded what it was.
    origin = {"command": command, **provenance.origin(prepared.config.device)}
    runs: list[dict[str, Any]] = []
    try:
        for repeat in range(prepared.config.repeats):
            for arm in rotated(prepared.arms, repeat):
                run = run_once(prepared, arm, repeat, folder, progress)
                runs.append(run)
                progress.run_finished(_run_line(run))
    except BaseException:
        if runs:
            with contextlib.suppress(Exception):  # the first failure is the one to report
                write_result(folder, describe(prepared, origin, started, runs), "partial.json")
        raise
    result = describe(prepared, origin, started, runs)
    write_result(folder, result)
    return result


def describe(
    prepared: Prepared,
    origin: Mapping[str, Any],
    started: datetime,
    runs: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The result document of the given runs: provenance, summaries, comparisons, raw runs."""
    when = {**origin, "started": started.isoformat(timespec="seconds")}
    outlined = outline(
        prepared.config,
        prepared.arms,
        prepared.dataset,
        prepared.workload,
        prepared.model,
        when,
    )
    return with_runs(outlined, runs, (datetime.now(UTC) - started).total_seconds())


def _run_line(run: Mapping[str, Any]) -> str:
    summary = run["summary"]
    failed = f", {summary['failed']} FAILED" if summary["failed"] else ""
    return (
        f"repeat {run['repeat'] + 1} {run['arm']}: {summary['output_tokens_per_s']:.1f} tokens/s, "
        f"started in {run['startup_s']:.0f} s, served {summary['duration_s']:.0f} s{failed}"
    )
