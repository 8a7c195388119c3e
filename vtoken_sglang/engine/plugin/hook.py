"""Every place where this package reaches into SGLang, as data, with fail-closed registration.

SGLang logs a hook that does not land and serves on. For KV memory that is wrong, so each hook is

  resolved   before it is registered (target exists, its file is the one this code was written for),
  verified   after `HookRegistry.apply_hooks` ran (our function is really in the call chain),
  attested   by each scheduler in its ready message (see `launch_hooks.check_attestation`).

Any of the three failing raises `HookError`, which the plugin turns into process exit.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vtoken_sglang.engine.plugin.upstream import UPSTREAM_SHA256
from vtoken_sglang.errors import HookError

HOOKS = "vtoken_sglang.engine."


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One attachment point.

    Fields:
        name: short name used in messages and attestation.
        target: dotted path of the SGLang function or method.
        kind: how the hook wraps it, in SGLang's `HookType` terms.
        hook: `module:function` of ours, relative to `vtoken_sglang.engine`; imported late.
        source: file that defines the target, relative to the `sglang` package; its sha256 is in
            `upstream.UPSTREAM_SHA256` unless a patch of ours owns the file.
        why: what would break without it.
        remove_when: what upstream would have to offer so that the hook can go.
    """

    name: str
    target: str
    kind: Literal["after", "around"]
    hook: str
    source: str
    why: str
    remove_when: str


LAUNCHER_HOOKS: tuple[Hook, ...] = (
    Hook(
        name="cli-flags",
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        kind="after",
        hook="hooks.launcher:add_flags",
        source="srt/server_args.py",
        why="--vtoken-* flags on SGLang's own command line",
        remove_when="SGLang lets a plugin declare server arguments",
    ),
    Hook(
        name="cli-config",
        target="sglang.srt.server_args.ServerArgs.from_cli_args",
        kind="after",
        hook="hooks.launcher:activate_from_arguments",
        source="srt/server_args.py",
        why="turns the flags into one frozen config that child processes inherit",
        remove_when="SGLang lets a plugin declare server arguments",
    ),
    Hook(
        name="refusals",
        target="sglang.srt.server_args.ServerArgs.check_server_args",
        kind="after",
        hook="hooks.launcher:refuse_unsupported_arguments",
        source="srt/server_args.py",
        why="unsupported engine modes are refused before the model loads",
        remove_when="SGLang gives plugins a validation call-out",
    ),
    Hook(
        name="handshake",
        target="sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
        kind="after",
        hook="hooks.launcher:check_attestation",
        source="srt/entrypoints/engine.py",
        why="a scheduler that came up without the plugin must not be served",
        remove_when="SGLang fails when a plugin fails",
    ),
    Hook(
        name="handshake-dp",
        target="sglang.srt.managers.data_parallel_controller.DataParallelController.get_init_info",
        kind="after",
        hook="hooks.launcher:forward_attestation",
        source="srt/managers/data_parallel_controller.py",
        why="carries the schedulers' attestations through the data-parallel controller",
        remove_when="the controller forwards unknown ready fields",
    ),
    Hook(
        name="request-options",
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        kind="after",
        hook="hooks.launcher:validate_request",
        source="srt/managers/tokenizer_manager.py",
        why="a malformed per-request option gives HTTP 400 instead of being ignored",
        remove_when="SGLang validates custom_params through a registry",
    ),
)

SCHEDULER_HOOKS: tuple[Hook, ...] = (
    Hook(
        name="attestation",
        target="sglang.srt.managers.scheduler.Scheduler.get_init_info",
        kind="after",
        hook="hooks.scheduler:attest",
        source="srt/managers/scheduler.py",
        why="proves to the launcher that this scheduler runs with every hook in place",
        remove_when="SGLang fails when a plugin fails",
    ),
    Hook(
        name="safe-point",
        target="sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        kind="around",
        hook="hooks.scheduler:before_schedule",
        source="srt/managers/scheduler.py",
        why="rows, counts and ledger change between two forwards, nowhere else",
        remove_when="SGLang calls plugins before it plans a batch",
    ),
    Hook(
        name="row-free",
        target="sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.free_kv_row",
        kind="around",
        hook="hooks.scheduler:free_row_segments",
        source="srt/mem_cache/base_prefix_cache.py",
        why="a pruned row does not name the pages it holds; stock freeing would free the sink page",
        remove_when="free_kv_row asks a row owner",
    ),
    Hook(
        name="row-release",
        target="sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
        kind="around",
        hook="hooks.scheduler:free_request_row",
        source="srt/mem_cache/memory_pool.py",
        why="state of a row must not survive into the next request (finish, abort, retraction)",
        remove_when="the pool offers a row-release listener",
    ),
    Hook(
        name="queue-entry",
        target="sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        kind="after",
        hook="hooks.scheduler:keep_prompt_private",
        source="srt/managers/scheduler.py",
        why="publish=never must hold before the first chunk is stashed into the tree",
        remove_when="a request can opt out of insertion by a parameter",
    ),
    Hook(
        name="idle",
        target="sglang.srt.managers.scheduler.Scheduler.on_idle",
        kind="around",
        hook="hooks.scheduler:drain_when_idle",
        source="srt/managers/scheduler.py",
        why="the idle leak check needs pending copies settled",
        remove_when="SGLang asks listeners to drain",
    ),
    Hook(
        name="flush",
        target="sglang.srt.managers.scheduler.Scheduler.flush_cache",
        kind="around",
        hook="hooks.scheduler:drain_before_flush",
        source="srt/managers/scheduler.py",
        why="a late copy would write into pages that the flush gave away",
        remove_when="SGLang asks listeners to drain",
    ),
    Hook(
        name="busy-check",
        target=(
            "sglang.srt.managers.scheduler_components.invariant_checker"
            ".SchedulerInvariantChecker._get_total_uncached_sizes"
        ),
        kind="after",
        hook="hooks.scheduler:count_orphans",
        source="srt/managers/scheduler_components/invariant_checker.py",
        why="destinations of an ended request's copy are in no record",
        remove_when="the checker asks listeners for held tokens",
    ),
    Hook(
        name="server-info",
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        kind="after",
        hook="hooks.scheduler:add_state",
        source="srt/managers/scheduler.py",
        why="counters of this package in /server_info",
        remove_when="SGLang lets plugins contribute internal state",
    ),
    Hook(
        name="prefill-budget",
        target="sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.create_prefill_budget",
        kind="around",
        hook="hooks.admission:create_budget",
        source="srt/mem_cache/allocator/base.py",
        why="admission charges a pruned request what it will hold, not its whole length",
        remove_when="the budget asks requests for their demand",
    ),
    Hook(
        name="running-reserve",
        target=(
            "sglang.srt.managers.schedule_policy.PrefillAdder"
            "._get_running_request_total_token_offset"
        ),
        kind="around",
        hook="hooks.admission:running_reserve",
        source="srt/managers/schedule_policy.py",
        why="SGLang reserves for running requests as if nothing of them were ever given back",
        remove_when="the reserve asks requests for their demand",
    ),
    Hook(
        name="admission",
        target="sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        kind="around",
        hook="hooks.admission:add_waiting",
        source="srt/managers/schedule_policy.py",
        why="the budget's checks do not name the request they are about",
        remove_when="the budget is handed the request",
    ),
    Hook(
        name="next-chunk",
        target="sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        kind="around",
        hook="hooks.admission:add_chunked",
        source="srt/managers/schedule_policy.py",
        why="a prompt longer than the pool goes on in chunks of what is free",
        remove_when="the budget is handed the request",
    ),
    Hook(
        name="shortage",
        target="sglang.srt.managers.scheduler.Scheduler.update_running_batch",
        kind="around",
        hook="hooks.admission:relieve_before_retraction",
        source="srt/managers/scheduler.py",
        why="what can still be reclaimed is, before a request is taken back and computed again",
        remove_when="SGLang asks listeners for memory before it retracts",
    ),
    Hook(
        name="answer-length",
        target="sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
        kind="around",
        hook="hooks.admission:lift_length",
        source="srt/managers/scheduler.py",
        why="SGLang clips a request to the pool's size, as if nothing of it were ever given back",
        remove_when="the clip asks the request for its demand",
    ),
    Hook(
        name="prompt-length",
        target="sglang.srt.managers.utils.validate_input_length",
        kind="around",
        hook="hooks.admission:lift_prompt",
        source="srt/managers/utils.py",
        why="SGLang refuses a prompt that the pool does not hold whole",
        remove_when="the check asks the request for its demand",
    ),
    Hook(
        name="prefix-match",
        target="sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
        kind="around",
        hook="hooks.admission:limit_match",
        source="srt/managers/schedule_batch.py",
        why="a request longer than the pool would wait for ever for memory that its own lock holds",
        remove_when="a request can limit its match by a parameter",
    ),
)


def verify_source(name: str, source: str, package_root: Path, patched: frozenset[str]) -> None:
    """Raise HookError for hook `name` unless the file `source` is the one written against.

    Files in `patched` belong to the patch series and are checked by `vtoken_sglang.patching`.
    """
    if source in patched:
        return
    expected = UPSTREAM_SHA256[source]
    path = package_root / source
    got = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "no file"
    if got != expected:
        raise HookError(
            name,
            f"sglang/{source} differs from the supported release "
            f"(sha256 {got[:12]}, expected {expected[:12]})",
            "reinstall the supported sglang, or remove the local change",
        )


def register(hook: Hook) -> None:
    """Register one hook. Raises HookError when the target or the hook cannot be resolved."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    try:
        pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError, ValueError) as error:
        raise HookError(hook.name, f"target {hook.target} does not exist ({error})") from error
    HookRegistry.register(hook.target, resolve_hook(hook), HookType[hook.kind.upper()])


def resolve_hook(hook: Hook) -> Callable[..., Any]:
    """Import and return our function for this hook."""
    module_name, function_name = hook.hook.split(":")
    function = getattr(importlib.import_module(HOOKS + module_name), function_name)
    assert callable(function)
    return function


def verify_landed(hook: Hook) -> None:
    """Raise HookError unless our hook is in the target's call chain."""
    function = resolve_hook(hook)
    if not any(function is found for found in _wrapped_hooks(pkgutil.resolve_name(hook.target))):
        raise HookError(hook.name, f"the hook on {hook.target} did not land")


def _wrapped_hooks(function: Any) -> Iterator[object]:
    """Yield every object closed over by the wrappers around `function`, outermost first."""
    function = getattr(function, "__func__", function)
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            yield cell.cell_contents
        function = getattr(function, "__wrapped__", None)
