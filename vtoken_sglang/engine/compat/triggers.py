"""When a rule over server arguments applies: reusable conditions and the few written by hand."""

from __future__ import annotations

from typing import Any

from vtoken_sglang.engine.compat.rule import ArgsView, Ask, Trigger, required

SUPPORTED_BACKENDS = ("flashinfer", "triton", "torch_native")
"""Attention backends that this package has a subclass for (DESIGN 6)."""

PLAIN_KV_DTYPES = ("auto", "bf16", "bfloat16")


def switch(name: str, flag: str) -> Trigger:
    """Applies when a boolean field is on; the offline Engine takes any value that is true."""
    return Trigger(fields=(name,), find=lambda args: flag if args.value(name) else None)


def more_than_one(name: str, flag: str) -> Trigger:
    """Applies when a size is above one."""
    return Trigger(
        fields=(name,), find=lambda args: args.spelled(name, flag) if args.value(name) > 1 else None
    )


def differs(name: str, flag: str, default: object) -> Trigger:
    """Applies when a field has any value but `default`."""
    return Trigger(
        fields=(name,),
        find=lambda args: args.spelled(name, flag) if args.value(name) != default else None,
    )


def environment(name: str) -> Trigger:
    """Applies when one of SGLang's boolean environment variables is on."""

    def find(_args: ArgsView) -> str | None:
        from sglang.srt.environ import envs

        return f"{name}=1" if required(envs, name).get() else None

    return Trigger(environ=(name,), find=find)


def any_of(*triggers: Trigger) -> Trigger:
    """Applies when one of `triggers` does; names the first."""

    def find(args: ArgsView) -> str | None:
        return next((hit for t in triggers if (hit := t.find(args)) is not None), None)

    return Trigger(
        fields=tuple(name for t in triggers for name in t.fields),
        environ=tuple(name for t in triggers for name in t.environ),
        find=find,
    )


def speculative(args: ArgsView) -> str | None:
    """Speculative decoding, but not the hidden-state capture that borrows its flag."""
    # With --enable-return-aux-hidden-states the algorithm only names a capture convention, and
    # resolution sets it back to None.
    if not args.resolved and args.value("enable_return_aux_hidden_states"):
        return None
    name = "speculative_algorithm"
    return None if args.value(name) is None else args.spelled(name, "--speculative-algorithm")


def attention_dp(args: ArgsView) -> str | None:
    """Data-parallel attention under any of its spellings."""
    if args.value("attn_dp_size") > 1:
        return args.spelled("attn_dp_size", "--attn-dp-size")
    if args.value("enable_dp_attention"):  # deprecated spelling, before resolution
        return "--enable-dp-attention"
    # A joiner of an elastic deployment runs attention-DP code even when one rank wide.
    if args.value("ep_join_mode") == "scale":
        return "--elastic-ep-join-mode scale"
    return None


def kv_dtype(args: ArgsView) -> str | None:
    """A KV dtype that is not the model's own or bfloat16."""
    name = "kv_cache_dtype"
    return None if args.value(name) in PLAIN_KV_DTYPES else args.spelled(name, "--kv-cache-dtype")


BACKEND_FIELDS = (
    ("attention_backend", "--attention-backend"),
    ("prefill_attention_backend", "--prefill-attention-backend"),
    ("decode_attention_backend", "--decode-attention-backend"),
)


def backend(args: ArgsView) -> str | None:
    """An attention backend without a subclass of ours, or none decided."""
    for name, flag in BACKEND_FIELDS:
        value = args.value(name)
        if value is not None and value not in SUPPORTED_BACKENDS:
            return args.spelled(name, flag)
    if args.resolved and not all(_phase_backends(args)):
        return "an undecided attention backend"
    return None


def _phase_backends(args: ArgsView) -> tuple[str | None, str | None]:
    base = args.value("attention_backend")
    prefill = args.value("prefill_attention_backend") or base
    return prefill, args.value("decode_attention_backend") or base


def split_backends(args: ArgsView) -> str | None:
    """Prefill and decode on different attention backends."""
    prefill, decode = _phase_backends(args)
    if prefill is None or decode is None or prefill == decode:
        return None
    return f"--prefill-attention-backend {prefill} with --decode-attention-backend {decode}"


def full_prefill_graph(args: ArgsView) -> str | None:
    """A CUDA graph over the whole prefill, attention included."""
    prefill = _member(args.value("cuda_graph_config"), "prefill")
    resolved = _member(prefill, "backend")
    if "full" in (resolved, args.value("cuda_graph_backend_prefill")):
        return "--cuda-graph-backend-prefill full"
    return None


def _member(group: Any, name: str) -> Any:
    """A member of a group of options, which the offline Engine takes as a dict, too."""
    return group.get(name) if isinstance(group, dict) else getattr(group, name, None)


def device(args: ArgsView) -> str | None:
    """A device other than NVIDIA's and CPU. PyTorch for ROCm calls its devices cuda, too."""
    value = args.value("device")
    kind = None if value is None else str(value).split(":", 1)[0]
    if kind in (None, "cpu"):
        return None
    if kind == "cuda":
        import torch

        return None if torch.version.hip is None else f"{args.spelled('device', '--device')} (ROCm)"
    return args.spelled("device", "--device")


def flexkv_backend(args: ArgsView) -> str | None:
    """FlexKV asked for as a prefix-cache backend."""
    return "--radix-cache-backend flexkv" if args.value("radix_cache_backend") == "flexkv" else None


def ask(text: str, *, stopped: bool = False, also: tuple[str, ...] = ()) -> Ask:
    """An `Ask` from one line of flags."""
    return Ask(argv=tuple(text.split()), stopped_by_sglang=stopped, also=also)
