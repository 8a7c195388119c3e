"""One evaluation: every arm served once per repeat, the same requests to each, one result file."""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vtoken_sglang.package_files import cache_root
from vtoken_sglang.patching import stage_pristine_overlay

from . import provenance
from .arms import Arm, rotated, select_arms
from .chat import ModelTokenizer
from .client import LoadClient, RunTrace
from .compare import check_tokens, compare_arms, summarize_arms
from .config import EvalConfig
from .errors import ServerError
from .metrics import summarize
from .progress import Progress
from .results import write_result
from .server import HOST, SETTLE_S, ServerProcess, free_port
from .sharegpt import Dataset, find_dataset, load_dataset
from .workload import Session, Workload, build_workload

WARM_UP_TOKENS = 8
FLUSH_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Everything known before the first server starts. `config` has no "auto" left in it."""

    config: EvalConfig
    arms: tuple[Arm, ...]
    dataset: Dataset
    workload: Workload
    model: Mapping[str, Any]


def prepare(config: EvalConfig) -> Prepared:
    """Resolve the device, read the data and build the requests.

    Raises:
        ConfigError: a setting cannot be served (see `EvalConfig`, `build_workload`).
        DatasetError: no dataset, or too little in it.
    """
    device = provenance.resolve_device(config.device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    config = replace(config, device=device, dtype=dtype)
    dataset = load_dataset(find_dataset(config.dataset))
    workload = build_workload(config, dataset, ModelTokenizer(config.model))
    return Prepared(
        config=config,
        arms=select_arms(config.arms),
        dataset=dataset,
        workload=workload,
        model=provenance.model_facts(config.model),
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


def server_environment(config: EvalConfig) -> dict[str, str]:
    """Environment of every server: one thread per process on a CPU, quiet tokenizers."""
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if config.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def stock_environment() -> dict[str, str]:
    """What makes an arm truly stock in an environment whose SGLang is patched: the released files
    come first on the path, and of this package only the CPU platform is loaded, without which
    SGLang does not run on a machine that has no accelerator."""
    overlay = stage_pristine_overlay(cache_root() / "stock-sglang")
    path = os.pathsep.join(filter(None, (str(overlay), os.environ.get("PYTHONPATH", ""))))
    # Bytecode is written beside the overlay, or every process of every start compiles SGLang again.
    bytecode = {"PYTHONDONTWRITEBYTECODE": ""}
    return {"PYTHONPATH": path, "SGLANG_PLUGINS": "vtoken_cpu", **bytecode}


def warm_up_workload(workload: Workload) -> Workload:
    """One short session of two turns whose ids occur in no measured prompt's beginning."""
    first = tuple(reversed(workload.sessions[0].first_prompt))
    session = Session(
        session=0,
        lane=0,
        first_prompt=first,
        later_turns=(first[:16],),
        answer_tokens=(WARM_UP_TOKENS, WARM_UP_TOKENS),
    )
    return Workload(name="warm-up", sessions=(session,))


def flush_cache(base_url: str) -> None:
    """Empty the server's prefix cache, so that warm-up leaves nothing to hit.

    Raises:
        ServerError: the server refused.
    """
    request = urllib.request.Request(f"{base_url}/flush_cache", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=FLUSH_TIMEOUT_S) as answer:
            answer.read()
    except OSError as error:
        raise ServerError(f"the server did not flush its cache: {error}") from error


def run_once(prepared: Prepared, arm: Arm, repeat: int, folder: Path, progress: Progress) -> Any:
    """Serve one arm once and return its run as plain data.

    Raises:
        ServerError: the server did not start, or ended while it was used.
    """
    config, workload = prepared.config, prepared.workload
    port = config.port or free_port()
    load_before = os.getloadavg()[0]
    label = f"repeat {repeat + 1} {arm.name}"
    command = arm.command(engine_args(config, port))
    environment = server_environment(config)
    if arm.vtoken_args is None:
        environment |= stock_environment()
    server = ServerProcess(
        command,
        port,
        folder / f"server-{repeat + 1}-{arm.name}.log",
        environment,
        config.startup_timeout,
    )
    progress.stage(f"{label}: starting")
    with server:
        progress.stage(f"{label}: warming up")
        client = LoadClient(server.base_url, config.sample_interval)
        _check(server, client.run(warm_up_workload(workload)))
        flush_cache(server.base_url)
        progress.stage(label)
        cpu_before = server.cpu_seconds()
        trace = client.run(workload, progress.request)
        cpu_s = server.cpu_seconds() - cpu_before
        failed = any(record.error for record in trace.records)
        server.require_alive("while it was measured", SETTLE_S if failed else 0.0)
    return {
        "arm": arm.name,
        "repeat": repeat,
        "command": provenance.portable_command(command),
        "startup_s": server.startup_s,
        "load_average_before": load_before,
        "summary": summarize(trace, cpu_s),
        "requests": [asdict(record) for record in trace.records],
        "pool": [asdict(sample) for sample in trace.pool],
    }


def _check(server: ServerProcess, trace: RunTrace) -> None:
    for record in trace.records:
        if record.error:
            server.require_alive("during warm-up", SETTLE_S)
            raise server.error(f"warm-up request failed: {record.error}")


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
    dataset, workload = prepared.dataset, prepared.workload
    return {
        **origin,
        "started": started.isoformat(timespec="seconds"),
        "duration_s": (datetime.now(UTC) - started).total_seconds(),
        "runs_planned": prepared.config.repeats * len(prepared.arms),
        "config": prepared.config.to_dict(),
        "model": dict(prepared.model),
        "dataset": {
            "name": dataset.name,
            "size_bytes": dataset.size_bytes,
            "sha256": dataset.sha256,
            "conversations": len(dataset.conversations),
            "unusable_records": dataset.unusable,
            "dropped_chars": dataset.dropped_chars,
        },
        "workload": {
            "name": workload.name,
            "fingerprint": workload.fingerprint(),
            "requests": workload.requests,
            "longest_session_tokens": workload.longest(),
            **workload.facts,
        },
        "arms": [
            {"name": arm.name, "summary": arm.summary, "reference": arm.reference}
            for arm in prepared.arms
        ],
        "summary": summarize_arms(runs),
        "comparisons": compare_arms(runs),
        "tokens": {
            "reference": prepared.arms[0].name,
            "arms": check_tokens(runs, prepared.arms[0].name),
        },
        "runs": list(runs),
    }


def _run_line(run: Mapping[str, Any]) -> str:
    summary = run["summary"]
    failed = f", {summary['failed']} FAILED" if summary["failed"] else ""
    return (
        f"repeat {run['repeat'] + 1} {run['arm']}: {summary['output_tokens_per_s']:.1f} tokens/s, "
        f"started in {run['startup_s']:.0f} s, served {summary['duration_s']:.0f} s{failed}"
    )
