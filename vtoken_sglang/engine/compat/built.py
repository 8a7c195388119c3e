"""What the built objects of a scheduler process must be, whatever the arguments said.

Exact types, not `isinstance`: a subclass stores or frees KV in its own way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vtoken_sglang.engine.compat.arguments import SUPPORTED_BACKENDS, server_args_hits
from vtoken_sglang.engine.compat.models import PLAIN_MODEL, layer_hits
from vtoken_sglang.engine.compat.rule import Hit, refuse, required

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner


def refuse_runtime(scheduler: Scheduler) -> None:
    """Refuse a fully built scheduler: its arguments, model, pools, backends and prefix cache.

    Raises:
        UnsupportedModesError: one line for each thing that is not plain.
        HookError: an attribute that is checked does not exist in this SGLang.
    """
    runner = required(required(scheduler, "tp_worker"), "model_runner")
    path = required(required(runner, "model_config"), "model_path")
    refuse(
        server_args_hits(required(scheduler, "server_args"))
        + pool_hits(runner)
        + layer_hits(required(runner, "model"), path)
        + backend_hits(runner)
        + tree_hits(required(scheduler, "tree_cache"))
    )


def pool_hits(runner: ModelRunner) -> tuple[Hit, ...]:
    """The KV buffers, the allocator and the rows of a model runner."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    pool, allocators = (
        required(runner, "token_to_kv_pool"),
        (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator),
    )
    hits = (
        _other("KV pool", pool, (MHATokenToKVPool,), "only its buffers are understood")
        or _buffers(pool),
        _other(
            "slot allocator",
            required(runner, "token_to_kv_pool_allocator"),
            allocators,
            "pages must be P consecutive slots that are freed by slot",
        ),
        _other(
            "row table",
            required(runner, "req_to_token_pool"),
            (ReqToTokenPool,),
            "other tables keep state beside the row",
        ),
    )
    return tuple(hit for hit in hits if hit is not None)


def backend_hits(runner: ModelRunner) -> tuple[Hit, ...]:
    """The attention backends of a model runner, by the names it was built with."""
    prefill = required(runner, "prefill_attention_backend_str")
    decode = required(runner, "decode_attention_backend_str")
    if prefill == decode and prefill in SUPPORTED_BACKENDS:
        return ()
    flag = f"attention backend {prefill} for prefill, {decode} for decode"
    reason = "rows would be read without skipping evicted tokens"
    remedy = f"pass only --attention-backend, one of {', '.join(SUPPORTED_BACKENDS)}"
    return (Hit("runtime-backend", flag, reason, remedy),)


def tree_hits(tree: BasePrefixCache) -> tuple[Hit, ...]:
    """The prefix cache: its class, its components, and anything attached to it."""
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    known = (UnifiedRadixCache, RadixCache)
    wrong = _other("prefix cache", tree, known, "others own slots in their own way")
    if wrong is not None or type(tree) is RadixCache:
        return () if wrong is None else (wrong,)
    attached = [name for name in ("cache_controller", "linker") if required(tree, name) is not None]
    components = tuple(required(tree, "tree_components"))
    if components != (ComponentType.FULL,):
        attached.append("components " + ", ".join(str(component) for component in components))
    flag = "prefix cache with " + ", ".join(attached)
    reason = "KV is copied or kept where the copy fence does not reach"
    remedy = "drop the flags that add storage or a second kind of state to the prefix cache"
    return (Hit("runtime-tree", flag, reason, remedy),) if attached else ()


def _other(what: str, found: Any, wanted: tuple[type, ...], reason: str) -> Hit | None:
    if type(found) in wanted:
        return None
    names = " or ".join(kind.__name__ for kind in wanted)
    flag = f"{what} {type(found).__name__} (not {names})"
    remedy = f"{PLAIN_MODEL}, without flags that change how KV is stored"
    return Hit(f"runtime-{what.replace(' ', '-').lower()}", flag, reason, remedy)


def _buffers(pool: KVCache) -> Hit | None:
    import torch

    layout, dtype = required(pool, "kv_cache_layout"), required(pool, "dtype")
    plain = layout == "nhd" and dtype in (torch.float32, torch.float16, torch.bfloat16)
    if plain and dtype == required(pool, "store_dtype"):
        return None
    return Hit(
        "runtime-kv-buffers",
        f"KV buffers of layout {layout}, dtype {dtype}",
        "moved and scored tokens are tested on unquantised NHD buffers only",
        "pass --kv-cache-dtype bfloat16 and unset SGLANG_USE_HND_KVCACHE",
    )
