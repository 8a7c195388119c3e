"""Measure a study: every arm at every load in every repeat, native first among those that follow
each other on one server, each with an empty cache.

Servers are started one after the other in every repeat, in rotating order. One server for
everything stays up from the first cell to the last, and so do all of them in a paired study, whose
cells take turns.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from . import provenance
from .arms import NATIVE, Arm, Group, groups_of, rotated
from .chat import ModelTokenizer
from .client import LoadClient, RunTrace
from .errors import ServerError
from .metrics import recall, summarize
from .options import Options, local_folder
from .questions import ask, ask_lm_eval, check_extras, summary_of, tasks_of
from .sampling import added, private_memory, read_counters
from .server import SETTLE_S
from .sharegpt import Dataset
from .sources import load_source
from .store import RunStore
from .targets import RunningServer, ServerFacts, Target, flush_cache, require_arm, start_server
from .workloads.base import Session, Workload
from .workloads.build import build_workload

WARM_UP_TOKENS = 8
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be measured, resolved: nothing is left to chance or to the machine.

    Fields:
        missing: what the servers do not tell, for the reader; empty for servers of our own.
        running: servers that already run, by URL.
    """

    name: str
    options: Options
    groups: tuple[Group, ...]
    dataset: Dataset
    workload: Workload
    tokenizer: ModelTokenizer
    running: dict[str, RunningServer]
    missing: tuple[str, ...] = ()

    @property
    def arms(self) -> list[Arm]:
        return [arm for group in self.groups for arm in group.arms]

    @property
    def baseline(self) -> Arm:
        """The arm that every other is divided by: native, even where stock comes before it."""
        return next((arm for arm in self.arms if arm.name == NATIVE), self.arms[0])

    @property
    def loads(self) -> tuple[int, ...]:
        """Sessions in flight, one run each; 0 where the workload decides (a trace, a burst)."""
        decided = self.workload.timed or self.options.burst
        return (0,) if decided else self.options.concurrency

    def head(self, command: str) -> dict[str, Any]:
        """The head line of the store."""
        return {
            "name": self.name,
            "command": command,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "options": self.options.to_dict(),
            "arms": [arm.columns() for arm in self.arms],
            "baseline": self.baseline.name,
            "missing": list(self.missing),
            "model": provenance.model_facts(self.options.model),
            "dataset": {"name": self.dataset.name, "sha256": self.dataset.sha256},
            "workload": {
                "name": self.workload.name,
                "sessions": len(self.workload.sessions),
                "requests": self.workload.requests,
                "output_tokens": self.workload.output_tokens(),
                "longest": self.workload.longest(),
                "facts": self.workload.facts,
                "fingerprint": self.workload.fingerprint(),
            },
            **provenance.origin("cpu" if self.running else self.options.device),
        }


def make_plan(name: str, options: Options) -> Plan:
    """Find servers, model and data, and build the requests.

    Raises:
        ConfigError, DatasetError, ServerError: something asked for is not there.
    """
    check_extras(options)
    running = {url: RunningServer(url) for url in options.url}
    groups = groups_of(options)
    missing: tuple[str, ...] = ()
    if running:
        asked = any(arm.prunes for group in groups for arm in group.arms)
        groups = tuple(_served_by(group, running[group.key]) for group in groups)
        if asked and not any(arm.prunes for group in groups for arm in group.arms):
            raise ServerError(
                f"{', '.join(running)}: runs without vtoken-sglang, so no request can be pruned; "
                "start it with `vtoken-sglang serve ... --vtoken-policy NAME`, or pass "
                "--policies none"
            )
        missing = tuple(dict.fromkeys(m for one in running.values() for m in one.facts.missing))
        options = _as_running(options, next(iter(running.values())).facts)
    else:
        options = _resolved(options)
    dataset = load_source(options)
    tokenizer = ModelTokenizer(options.model)
    workload = build_workload(options, dataset, tokenizer)
    context = int(provenance.model_facts(options.model).get("context", 0))
    limits = [one.facts.limit for one in running.values()]
    limits = limits or [options.pool - options.page_size, context]
    if limit := min(filter(None, limits), default=0):
        workload = workload.that_fits(limit)
    return Plan(
        name=name,
        options=options,
        groups=groups,
        dataset=dataset,
        workload=workload,
        tokenizer=tokenizer,
        running=running,
        missing=missing,
    )


def _served_by(group: Group, server: RunningServer) -> Group:
    """The group's arms that the server can serve: one without this package has its own way only."""
    if server.facts.prunes:
        return group
    return replace(group, arms=(replace(group.arms[0], request={}),))


def _as_running(options: Options, facts: ServerFacts) -> Options:
    return replace(
        options,
        model=options.model or facts.model,
        page_size=facts.page_size or options.page_size,
        pool=facts.pool or options.pool,
    )


def _resolved(options: Options) -> Options:
    device = provenance.resolve_device(options.device)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    model = local_folder(options.model)
    if not model:
        from .models import ensure_smollm2

        model = str(ensure_smollm2())
    return replace(options, device=device, dtype=dtype, model=model)


def run_study(plan: Plan, store: RunStore, say: Say) -> int:
    """Measure what the store lacks; returns how many requests failed.

    Raises:
        ServerError: a server did not start, ended, or cannot be used.
    """
    keep_up = plan.options.paired or len(plan.groups) == 1 or bool(plan.running)
    with contextlib.ExitStack() as stack:
        up: dict[str, Target] = {}
        for repeat in range(plan.options.repeats):
            for group in rotated(plan.groups, repeat):
                missing = [cell for cell in _cells(plan, group, repeat) if not store.has(*cell[1:])]
                if not missing:
                    continue
                with contextlib.ExitStack() as own:
                    target = up.get(group.key)
                    if target is None:
                        say(f"repeat {repeat + 1}: server {group.key or 'of all arms'}")
                        target = _enter(plan, group, store.folder, stack if keep_up else own)
                        _warm_up(plan, group, target)
                        if keep_up:
                            up[group.key] = target
                    for arm, _, load, _ in missing:
                        run = _measure(plan, arm, load, repeat, target)
                        store.add(run)
                        say(_line(run))
    return sum(int(run["failed"]) for run in store.runs)


def _cells(plan: Plan, group: Group, repeat: int) -> Iterator[tuple[Arm, str, int, int]]:
    for load in plan.loads:
        for arm in rotated(group.arms, repeat):
            yield arm, arm.name, load, repeat


def _enter(plan: Plan, group: Group, folder: Path, stack: contextlib.ExitStack) -> Target:
    if plan.running:
        return plan.running[group.key]
    return stack.enter_context(start_server(plan.options, group.key, folder))


def _warm_up(plan: Plan, group: Group, target: Target) -> None:
    """One short session of two turns whose ids occur in no measured prompt's beginning, and, on
    a server that is not ours, one request per arm."""
    if plan.running:
        for arm in group.arms:
            require_arm(target, arm)
    first = tuple(reversed(plan.workload.sessions[0].first_prompt))
    session = Session(
        session=0,
        first_prompt=first,
        later_turns=(first[:16],),
        answer_tokens=(WARM_UP_TOKENS, WARM_UP_TOKENS),
    )
    trace = LoadClient(target.base_url, plan.options.sample_interval).run(
        Workload(name="warm-up", sessions=(session,))
    )
    for record in trace.records:
        if record.error:
            target.require_alive("during warm-up", SETTLE_S)
            raise target.error(f"warm-up request failed: {record.error}")


def _measure(plan: Plan, arm: Arm, load: int, repeat: int, target: Target) -> dict[str, Any]:
    """One cell: an empty cache, the load, then the questions."""
    options, base_url = plan.options, target.base_url
    flush_cache(base_url)
    before, cpu_before = read_counters(base_url), target.cpu_seconds()
    client = LoadClient(base_url, options.sample_interval, arm.request)
    started, load_average = time.time(), os.getloadavg()[0]
    trace = client.run(plan.workload.over(load))
    cpu_after = target.cpu_seconds()
    failed = any(record.error for record in trace.records)
    target.require_alive("while it was measured", SETTLE_S if failed else 0.0)
    cpu_s = None if cpu_before is None or cpu_after is None else cpu_after - cpu_before
    counters = added(before, read_counters(base_url))
    answers = _answers(plan, arm, repeat, base_url)
    right = recall(plan.workload, trace.records, plan.tokenizer)
    return {
        **arm.columns(),
        "load": load,
        "repeat": repeat,
        "at": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "load_average": load_average,
        **summarize(trace, cpu_s, (options.slo_ttft, options.slo_tpot)),
        **private_memory(trace.pruned, options.page_size),
        **counters,
        **({"recall": sum(right) / len(right), "recall_questions": len(right)} if right else {}),
        **summary_of(answers),
        "answers": answers,
        "trace": _raw(trace),
    }


def _answers(plan: Plan, arm: Arm, repeat: int, base_url: str) -> list[dict[str, Any]]:
    options, found = plan.options, []
    tasks = tasks_of(options, plan.dataset, plan.tokenizer, repeat)
    if tasks:
        flush_cache(base_url)
        found += ask(base_url, tasks, arm.request, plan.tokenizer, options.sample_interval)
    if options.lm_eval and not repeat:  # the same questions in every repeat
        flush_cache(base_url)
        found += ask_lm_eval(base_url, options.model, options, arm.request)
    return found


def _raw(trace: RunTrace) -> dict[str, Any]:
    return {
        "requests": [asdict(record) for record in trace.records],
        "pool": [asdict(sample) for sample in trace.pool],
        "pruned": [asdict(sample) for sample in trace.pruned],
    }


def _line(run: dict[str, Any]) -> str:
    words = [f"{run['arm']:28}", f"load {run['load'] or 'own':>4}"]
    words.append(f"{run['tokens_per_s']:8.1f} tokens/s  p95 {run.get('e2e_p95', 0):6.2f} s")
    if "held_per_request" in run:
        words.append(f"{run['held_per_request']:7.0f} tokens held/request")
    if "quality" in run:
        words.append(f"{100 * run['quality']:4.0f} % right")
    if run["failed"]:
        words.append(f"{run['failed']} FAILED")
    return "  ".join(words)
