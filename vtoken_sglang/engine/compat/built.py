"""What the built objects of a scheduler process must be, whatever the arguments said.

Exact types, not `isinstance`: a subclass stores or frees KV in its own way.
"""

from __future__ import annotations

from typing import Any

from vtoken_sglang.engine.compat.models import PLAIN_MODEL, layer_hits
from vtoken_sglang.engine.compat.rule import Hit, required
from vtoken_sglang.engine.compat.triggers import SUPPORTED_BACKENDS


def pool_hits(runner: Any) -> tuple[Hit, ...]:
    """The KV buffers, the allocator and the rows of a model runner."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    pool = required(runner, "token_to_kv_pool")
    hits = [
        _wrong_type("KV pool", pool, (MHATokenToKVPool,), "only its buffers are understood"),
        _wrong_type(
            "slot allocator",
            required(runner, "token_to_kv_pool_allocator"),
            (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator),
            "pages must be P consecutive slots that are freed by slot",
        ),
        _wrong_type(
            "row table",
            required(runner, "req_to_token_pool"),
            (ReqToTokenPool,),
            "other tables keep state beside the row",
        ),
    ]
    if hits[0] is None:
        hits.append(_wrong_buffers(pool))
    return tuple(hit for hit in hits if hit is not None)


def runner_hits(runner: Any) -> tuple[Hit, ...]:
    """The pools and the attention layers of a model runner whose model is loaded."""
    path = required(required(runner, "model_config"), "model_path")
    return pool_hits(runner) + layer_hits(required(runner, "model"), path)


def backend_hits(runner: Any) -> tuple[Hit, ...]:
    """The attention backends of a model runner, by the names it was built with."""
    prefill = required(runner, "prefill_attention_backend_str")
    decode = required(runner, "decode_attention_backend_str")
    if prefill == decode and prefill in SUPPORTED_BACKENDS:
        return ()
    flag = f"attention backend {prefill} for prefill, {decode} for decode"
    reason = "rows would be read without skipping evicted tokens"
    remedy = f"pass only --attention-backend, one of {', '.join(SUPPORTED_BACKENDS)}"
    return (Hit(rule="runtime-backend", flag=flag, reason=reason, remedy=remedy),)


def tree_hits(tree: Any) -> tuple[Hit, ...]:
    """The prefix cache: its class, its components, and anything attached to it."""
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    wrong = _wrong_type(
        "prefix cache", tree, (UnifiedRadixCache, RadixCache), "others own slots in their own way"
    )
    if wrong is not None:
        return (wrong,)
    if type(tree) is RadixCache:
        return ()
    attached = [name for name in ("cache_controller", "linker") if required(tree, name) is not None]
    components = tuple(required(tree, "tree_components"))
    if components != (ComponentType.FULL,):
        attached.append("components " + ", ".join(str(c) for c in components))
    if not attached:
        return ()
    return (
        Hit(
            rule="runtime-tree",
            flag="prefix cache with " + ", ".join(attached),
            reason="KV is copied or kept where the copy fence does not reach",
            remedy="drop the flags that add storage or a second kind of state to the prefix cache",
        ),
    )


def _wrong_type(what: str, found: Any, wanted: tuple[type, ...], reason: str) -> Hit | None:
    if type(found) in wanted:
        return None
    names = " or ".join(kind.__name__ for kind in wanted)
    return Hit(
        rule=f"runtime-{what.replace(' ', '-').lower()}",
        flag=f"{what} {type(found).__name__} (not {names})",
        reason=reason,
        remedy=f"{PLAIN_MODEL}, without flags that change how KV is stored",
    )


def _wrong_buffers(pool: Any) -> Hit | None:
    import torch

    layout, dtype = required(pool, "kv_cache_layout"), required(pool, "dtype")
    plain = layout == "nhd" and dtype in (torch.float32, torch.float16, torch.bfloat16)
    if plain and dtype == required(pool, "store_dtype"):
        return None
    return Hit(
        rule="runtime-kv-buffers",
        flag=f"KV buffers of layout {layout}, dtype {dtype}",
        reason="moved and scored tokens are tested on unquantised NHD buffers only",
        remedy="pass --kv-cache-dtype bfloat16 and unset SGLANG_USE_HND_KVCACHE",
    )
