"""Run in a process of its own: import the touched SGLang modules and try what the patches add.

Prints one JSON line: `files` (where the modules came from), `patched`, `inert` (what is wrong with
the defaults), `heard` (listeners that were called, with the right arguments).
"""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

MODULES = (
    "managers.schedule_batch",
    "managers.scheduler",
    "managers.scheduler_components.pool_stats_observer",
    "mem_cache.kv_loc_plan",
    "model_executor.forward_batch_info",
)


def main() -> None:
    modules = {name: importlib.import_module(f"sglang.srt.{name}") for name in MODULES}
    scheduler_class = modules["managers.scheduler"].Scheduler
    report: dict[str, object] = {
        "files": [module.__file__ for module in modules.values()],
        "patched": hasattr(scheduler_class, "forward_done_listener"),
    }
    if report["patched"]:
        plan_class = modules["mem_cache.kv_loc_plan"].KVLocPlan
        report["inert"] = defaults_at_fault(modules, scheduler_class, plan_class)
        report["heard"] = listeners_heard(scheduler_class, plan_class)
    print(json.dumps(report))


def make_plan(plan_class: type) -> object:
    space = SimpleNamespace(key="full", write=None, read_v2p=None)
    return plan_class(
        source=SimpleNamespace(space=lambda kind: space),
        req_pool_indices=None,
        seq_lens=None,
        seq_lens_cpu=None,
        write_virtual=None,
    )


def defaults_at_fault(modules: dict, scheduler_class: type, plan_class: type) -> list[str]:
    record = modules["managers.schedule_batch"].ReqKvInfo(kv_allocated_len=33)
    private = modules["managers.scheduler_components.pool_stats_observer"].kv_private_tokens
    faults = []
    if private(record, 16) != 48:
        faults.append("private size without reclaimed tokens")
    for reclaimed in (32, -16):
        record.kv_reclaimed_tokens = reclaimed
        if private(record, 16) != 48 - reclaimed:
            faults.append(f"private size with {reclaimed} reclaimed tokens")
    record.mark_kv_released()
    if record.kv_reclaimed_tokens != 0 or private(record, 16) != 0:
        faults.append("reclaimed tokens survive the release")
    plan = make_plan(plan_class)
    names = ("kv_lens", "kv_lens_cpu", "kv_prefix_lens", "kv_prefix_lens_cpu")
    faults += [name for name in names if getattr(plan, name) is not None]
    plan.fill_kv_lens("batch", "forward batch")
    scheduler_class.__new__(scheduler_class)._notify_forward_done("batch")
    return faults


def listeners_heard(scheduler_class: type, plan_class: type) -> list[str]:
    heard: list[str] = []
    scheduler, plan = scheduler_class.__new__(scheduler_class), make_plan(plan_class)

    def on_forward(*arguments: object) -> None:
        heard.extend(["forward"] if arguments == (scheduler, "batch") else ["wrong arguments"])

    def on_plan(*arguments: object) -> None:
        heard.extend(["plan"] if arguments == (plan, "batch", "fb") else ["wrong arguments"])

    scheduler_class.forward_done_listener = on_forward
    plan_class.kv_lens_listener = on_plan
    scheduler._notify_forward_done("batch")
    plan.fill_kv_lens("batch", "fb")
    return heard


if __name__ == "__main__":
    main()
