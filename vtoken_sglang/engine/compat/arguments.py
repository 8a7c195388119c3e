"""Refused server arguments, one row each: when a row applies, why, and what to do instead.

`refuse_server_args` needs no model: call it as soon as the command line is parsed (SGLang itself
would stop some modes a moment later, without saying what we need), and again once SGLang has
resolved its arguments, when its own choices and the model's config are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vtoken_sglang.engine.compat.models import model_hits
from vtoken_sglang.engine.compat.rule import (
    ArgsView,
    Condition,
    Hit,
    Rule,
    flag_of,
    refuse,
    required,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

SUPPORTED_BACKENDS: Final = ("flashinfer", "triton", "torch_native")
"""Attention backends that this package has a subclass for (DESIGN 6)."""
BACKEND_FIELDS: Final = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
)
PLAIN_KV_DTYPES: Final = ("auto", "bf16", "bfloat16")


def refuse_server_args(server_args: ServerArgs) -> None:
    """Refuse a ServerArgs, resolved or not.

    On an unresolved one, rules on what SGLang would choose and on the model stay silent.

    Raises:
        UnsupportedModesError: one line for each refused mode, with flag, reason and remedy.
        HookError: an argument that a rule reads does not exist in this SGLang.
    """
    refuse(server_args_hits(server_args))


def server_args_hits(server_args: ServerArgs) -> tuple[Hit, ...]:
    """Every refused mode of a ServerArgs; empty when it can be served. Raises HookError."""
    args = ArgsView(server_args)
    hits = tuple(hit for rule in RULES if (hit := rule.hit(args)))
    config = args.model_config()
    return hits + (() if config is None else model_hits(config))


# -- when a row applies ---------------------------------------------------------------------------


def _on(*fields: str) -> Condition:
    """A switch is on; the offline Engine takes any value that is true."""

    def when(args: ArgsView) -> str | None:
        return next((flag_of(name) for name in fields if args.value(name)), None)

    return when


def _above_one(field: str) -> Condition:
    return lambda args: args.spelled(field) if args.value(field) > 1 else None


def _not(field: str, *plain: object) -> Condition:
    return lambda args: None if args.value(field) in plain else args.spelled(field)


def _environment(name: str) -> Condition:
    def when(_args: ArgsView) -> str | None:
        from sglang.srt.environ import envs

        return f"{name}=1" if required(envs, name).get() else None

    return when


def _any(*conditions: Condition) -> Condition:
    """The first that applies; all are asked, so that an argument that is gone is noticed."""
    return lambda args: next((flag for flag in [when(args) for when in conditions] if flag), None)


def _speculative(args: ArgsView) -> str | None:
    # With --enable-return-aux-hidden-states the algorithm only names a capture convention, and
    # resolution sets it back to None.
    if not args.resolved and args.value("enable_return_aux_hidden_states"):
        return None
    return _not("speculative_algorithm", None)(args)


def _attention_dp(args: ArgsView) -> str | None:
    # A joiner of an elastic deployment runs attention-DP code even when one rank wide.
    joins = args.value("ep_join_mode") == "scale"
    old = "--enable-dp-attention" if args.value("enable_dp_attention") else None
    elastic = "--elastic-ep-join-mode scale" if joins else None
    return _above_one("attn_dp_size")(args) or old or elastic


def _backend(args: ArgsView) -> str | None:
    for name in BACKEND_FIELDS:
        if args.value(name) not in (None, *SUPPORTED_BACKENDS):
            return args.spelled(name)
    undecided = args.resolved and not all(_phase_backends(args))
    return "an undecided attention backend" if undecided else None


def _split_backends(args: ArgsView) -> str | None:
    prefill, decode = _phase_backends(args)
    if prefill is None or decode is None or prefill == decode:
        return None
    return f"--prefill-attention-backend {prefill} with --decode-attention-backend {decode}"


def _phase_backends(args: ArgsView) -> tuple[str | None, str | None]:
    base, prefill, decode = (args.value(name) for name in BACKEND_FIELDS)
    return prefill or base, decode or base


def _full_prefill_graph(args: ArgsView) -> str | None:
    resolved = _member(_member(args.value("cuda_graph_config"), "prefill"), "backend")
    full = "full" in (resolved, args.value("cuda_graph_backend_prefill"))
    return "--cuda-graph-backend-prefill full" if full else None


def _member(group: Any, name: str) -> Any:
    """A member of a group of options, which the offline Engine takes as a dict, too."""
    return group.get(name) if isinstance(group, dict) else getattr(group, name, None)


def _device(args: ArgsView) -> str | None:
    value = args.value("device")
    kind = None if value is None else str(value).split(":", 1)[0]
    if kind == "cuda":  # as PyTorch calls ROCm's devices, too
        import torch

        return None if torch.version.hip is None else f"{args.spelled('device')} (ROCm)"
    return None if kind in (None, "cpu") else args.spelled("device")


_PREFIX_CACHE = "drop the flag; the prefix cache on the device stays"
_CONTEXT = "leave it at 1; use --dp-size for more devices"

RULES: Final = (
    # Scheduling, devices, ways in
    Rule("speculative", _any(_speculative, _not("decoupled_spec_role", "null")),
         "draft and verify steps allocate slots ahead and roll them back",
         "drop the --speculative-* flags"),
    Rule("pd-disaggregation",
         _any(_not("disaggregation_mode", "null"), _on("enable_pd_role_switch")),
         "KV is sent between servers by row, which a pruned row cannot describe",
         "run prefill and decode in one server"),
    Rule("encoder-disaggregation", _on("encoder_only", "language_only"),
         "the server is one half of a multimodal pair", "serve a text model in one server"),
    Rule("decode-context-parallel", _above_one("dcp_size"),
         "a row names slots of several ranks", _CONTEXT),
    Rule("prefill-context-parallel", _any(_above_one("attn_cp_size"), _on("enable_prefill_cp")),
         "the tokens of one prompt lie on several ranks", _CONTEXT),
    Rule("tensor-parallel", _above_one("tp_size"),
         "ranks must free the same pages in the same step, but a finished copy is seen at "
         "different times and scores differ by head",
         "use --dp-size, one model copy per device"),
    Rule("pipeline-parallel", _above_one("pp_size"),
         "several micro-batches are in flight, the safe point knows one", _CONTEXT),
    Rule("attention-dp", _attention_dp,
         "batches are padded and synchronised across schedulers that prune independently",
         "use --dp-size alone: independent schedulers are supported"),
    Rule("two-batch-overlap", _on("enable_two_batch_overlap"),
         "one forward becomes two that share rows"),
    Rule("pd-multiplexing", _on("enable_pdmux"),
         "prefill and decode run on separate streams, the copy fence follows one"),
    Rule("diffusion-llm", _not("dllm_algorithm", None),
         "KV of a block is rewritten until the block is done", "serve an autoregressive model"),
    Rule("streaming-session", _on("enable_streaming_session"),
         "a session keeps a row alive between requests and returns its KV on another path",
         "drop the flag; send the whole conversation, the prefix cache finds it"),
    Rule("multi-item-scoring", _on("enable_mis"),
         "its attention mask is built for a row without evicted tokens",
         "drop the flag; score one item per request"),
    Rule("deterministic",
         _any(_on("enable_deterministic_inference"), _not("rl_on_policy_target", None)),
         "a retraction restarts pruning, so output can depend on the load",
         "drop the flag, or serve without --vtoken-policy"),
    Rule("embedding", _on("is_embedding", "prefill_only_disable_kv_cache"),
         "nothing is decoded, so there is nothing to prune",
         "serve embeddings without --vtoken-policy"),
    Rule("ray", _on("use_ray"),
         "the options reach child processes by environment, Ray actors do not inherit it"),
    Rule("request-front-ends",
         _any(_above_one("tokenizer_worker_num"), _on("smg_grpc_mode", "grpc_mode"),
              _environment("SGLANG_RUST_SERVER")),
         "requests enter through a process that does not check per-request options",
         "use the HTTP server with one tokenizer worker"),
    # Where KV lives, who moves it, how attention reads it
    Rule("hicache", _on("enable_hierarchical_cache"),
         "copies to and from the host are not fenced against moved tokens", _PREFIX_CACHE),
    Rule("lmcache", _on("enable_lmcache"),
         "it replaces the prefix cache and reads rows on its own", _PREFIX_CACHE),
    Rule("flexkv",
         _any(_on("enable_flexkv"),
              lambda args: args.spelled("radix_cache_backend")
              if args.value("radix_cache_backend") == "flexkv" else None),
         "it replaces the prefix cache and reads rows on its own", _PREFIX_CACHE),
    Rule("external-linker", _on("enable_unified_cache_external_linker"),
         "transfers to the external store are not fenced against moved tokens", _PREFIX_CACHE),
    Rule("unified-memory", _on("enable_unified_memory", "enable_page_major_kv_layout"),
         "slots are virtual, or a page holds all layers, and SGLang moves them itself",
         "drop the flag; the plain per-layer KV buffers are used"),
    Rule("hisparse", _on("enable_hisparse"), "it keeps its own map from positions to slots"),
    Rule("kv-sharding", _on("enable_kv_cache_sharding"),
         "a rank holds only a stripe of every page"),
    Rule("session-radix-cache", _on("enable_session_radix_cache"),
         "sessions count references that a fork of the prefix would not return",
         "drop the flag; the plain prefix cache is used"),
    Rule("routed-experts", _on("enable_return_routed_experts", "enable_return_indexer_topk"),
         "captured values are stored by slot and read back through the row"),
    Rule("kv-canary", _not("kv_canary", "none"),
         "it expects every slot of a row to stay where it was written",
         "use --vtoken-check to check every step; it knows about moved tokens"),
    Rule("memory-saver", _on("enable_memory_saver"),
         "the KV buffers can be unmapped under a copy"),
    Rule("kv-dtype", _not("kv_cache_dtype", *PLAIN_KV_DTYPES),
         "moved and scored tokens are tested on unquantised KV only",
         "pass --kv-cache-dtype bfloat16, or auto for an unquantised checkpoint"),
    Rule("attention-backend", _backend,
         "it would read rows without skipping evicted tokens",
         "pass --attention-backend flashinfer on an NVIDIA GPU, torch_native on a CPU"),
    Rule("split-backends", _split_backends,
         "the wrapper around the two is not one of ours", "pass only --attention-backend"),
    Rule("full-prefill-graph", _full_prefill_graph,
         "the graph is captured over row lengths, live lengths come later",
         "leave --cuda-graph-backend-prefill at its default, or pass disabled"),
    Rule("torch-compile", _on("enable_torch_compile"),
         "host-side live lengths could be compiled in as constants"),
    Rule("mega-kernels", _on("enable_nvidia_megakernel", "enable_amd_monokernel"),
         "fused decode kernels pass the attention backend by"),
    Rule("strip-thinking", _on("strip_thinking_cache"),
         "a finished request returns its KV in two pieces cut at the prompt"),
    Rule("kv-layout", _environment("SGLANG_USE_HND_KVCACHE"),
         "a token's heads lie apart, copies move one row per token",
         "unset SGLANG_USE_HND_KVCACHE"),
    Rule("device", _device, "no kernels and no tests exist for it",
         "use an NVIDIA GPU or --device cpu"),
)  # fmt: skip
"""Every refused server argument, in the order of the message."""
