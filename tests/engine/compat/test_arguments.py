"""Refusal of unsupported modes, asked for through SGLang's own command line parser."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang.srt.server_args", reason="needs the supported SGLang")

import torch

from tests.engine.compat.conftest import PLAIN_MODEL, Ask, Make
from vtoken_sglang.engine.compat.arguments import RULES, refuse_server_args, server_args_hits
from vtoken_sglang.engine.compat.rule import ArgsView, UnsupportedModesError, flag_of
from vtoken_sglang.errors import MAX_SHOWN, HookError, UnsupportedModeError

without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="states what SGLang itself stops on a machine without a GPU"
)


def stopped(flags: str) -> Ask:
    return Ask(flags, stopped=True)


ASKS: Mapping[str, tuple[Ask, ...]] = {
    "speculative": (Ask("--speculative-algorithm NGRAM"), Ask("--decoupled-spec-role verifier")),
    "pd-disaggregation": (
        Ask("--disaggregation-mode decode"),
        Ask("--disaggregation-mode prefill"),
        Ask("--enable-pd-role-switch"),
    ),
    "encoder-disaggregation": (stopped("--encoder-only"), stopped("--language-only")),
    "decode-context-parallel": (Ask("--dcp-size 2"),),
    "prefill-context-parallel": (stopped("--attn-cp-size 2"), stopped("--enable-prefill-cp")),
    "tensor-parallel": (Ask("--tp-size 2"),),
    "pipeline-parallel": (Ask("--pp-size 2"),),
    "attention-dp": (stopped("--attn-dp-size 2"), stopped("--dp-size 2 --enable-dp-attention")),
    "two-batch-overlap": (stopped("--enable-two-batch-overlap"),),
    "pd-multiplexing": (stopped("--enable-pdmux"),),
    "diffusion-llm": (stopped("--dllm-algorithm LowConfidence"),),
    "streaming-session": (Ask("--enable-streaming-session"),),
    "multi-item-scoring": (stopped("--enable-mis"),),
    "deterministic": (
        stopped("--enable-deterministic-inference"),
        stopped("--rl-on-policy-target fsdp"),
    ),
    "embedding": (
        Ask("--is-embedding", also=("not-generating",)),
        stopped("--prefill-only-disable-kv-cache"),
    ),
    "ray": (Ask("--use-ray"),),
    "request-front-ends": (
        Ask("--tokenizer-worker-num 2"),
        Ask("--smg-grpc-mode"),
        Ask("--grpc-mode"),
        Ask(environ={"SGLANG_RUST_SERVER": "1"}),
    ),
    "hicache": (Ask("--enable-hierarchical-cache"),),
    "lmcache": (Ask("--enable-lmcache"),),
    "flexkv": (Ask("--enable-flexkv"), Ask("--radix-cache-backend flexkv")),
    "external-linker": (Ask("--enable-unified-cache-external-linker"),),
    "unified-memory": (
        stopped("--enable-unified-memory"),
        stopped("--enable-page-major-kv-layout"),
    ),
    "hisparse": (stopped("--enable-hisparse"),),
    "kv-sharding": (stopped("--enable-kv-cache-sharding"),),
    "session-radix-cache": (Ask("--enable-session-radix-cache"),),
    "routed-experts": (
        Ask("--enable-return-routed-experts"),
        Ask("--enable-return-indexer-topk"),
    ),
    "kv-canary": (Ask("--kv-canary log"),),
    "memory-saver": (Ask("--enable-memory-saver"),),
    "kv-dtype": (
        stopped("--kv-cache-dtype nvfp4"),
        stopped("--kv-cache-dtype fp4_mx_block16"),
        stopped("--kv-cache-dtype mxfp8"),
        Ask("--kv-cache-dtype fp8_e4m3"),
        Ask("--kv-cache-dtype fp8_e5m2"),
    ),
    "attention-backend": (
        Ask("--attention-backend fa3"),
        Ask("--attention-backend flex_attention"),
        stopped("--attention-backend trtllm_mha"),
        Ask("--prefill-attention-backend fa3 --decode-attention-backend fa3"),
    ),
    "split-backends": (Ask("--attention-backend torch_native --prefill-attention-backend triton"),),
    "full-prefill-graph": (Ask("--cuda-graph-backend-prefill full"),),
    "torch-compile": (Ask("--enable-torch-compile"),),
    "mega-kernels": (stopped("--enable-nvidia-megakernel"), stopped("--enable-amd-monokernel")),
    "strip-thinking": (Ask("--strip-thinking-cache"),),
    "kv-layout": (Ask(environ={"SGLANG_USE_HND_KVCACHE": "1"}),),
    "device": (stopped("--device npu"),),
}

LET_THROUGH = {
    "plain": "",
    "same cache class with its tree off; every page is private": "--disable-radix-cache",
    "lengths are given per request, whatever the batch holds": "--enable-mixed-chunk "
    "--chunked-prefill-size 64",
    "same safe point in both event loops": "--disable-overlap-schedule",
    "any page size": "--page-size 16",
    "schedulers are independent; each prunes its own requests": "--dp-size 2",
    "preemption releases a request as retraction does": "--enable-priority-scheduling",
    "structured output works on token ids, not on KV": "--grammar-backend xgrammar",
    "they come from the forward, not from KV": "--enable-return-hidden-states",
    "the algorithm only names a capture convention": "--speculative-algorithm EAGLE3 "
    "--enable-return-aux-hidden-states",
    "adapters change weights, and the prefix cache keeps them apart": "--enable-lora "
    "--max-lora-rank 8 --lora-target-modules all",
    "events come from the prefix cache, which never holds pruned KV": "--kv-events-config {}",
    "eviction orders whole tree nodes": "--radix-eviction-policy lfu",
}

EVERY_ASK = [
    pytest.param(name, ask, id=f"{name}-{number}")
    for name, asks in ASKS.items()
    for number, ask in enumerate(asks)
]


def refused(server_args: Any, name: str, ask: Ask) -> UnsupportedModesError:
    """Refuse `server_args`; only rule `name`, and those it is known to bring, may apply."""
    with pytest.raises(UnsupportedModeError) as caught:
        refuse_server_args(server_args)
    error = caught.value
    assert isinstance(error, UnsupportedModesError)
    assert name in {hit.rule for hit in error.hits} <= {name, *ask.also}
    lines = [f"{h.flag} is not supported: {h.reason}. Remedy: {h.remedy}" for h in error.hits]
    assert str(error).splitlines() == lines
    return error


def resolve(server_args: Any) -> None:
    server_args.resolve_once()
    server_args.check_server_args()


def test_every_rule_has_a_name_of_its_own_and_a_way_to_ask() -> None:
    assert [rule.name for rule in RULES] == list(ASKS)
    assert all(rule.reason and rule.remedy for rule in RULES)


@pytest.mark.parametrize(("name", "ask"), EVERY_ASK)
def test_a_flag_is_refused_before_sglang_resolves(make: Make, name: str, ask: Ask) -> None:
    (hit,) = refused(make(ask), name, ask).hits
    option = hit.flag.replace("=", " ").split()[0]
    assert option in (*ask.flags.split(), *ask.environ)


@without_gpu
@pytest.mark.parametrize(("name", "ask"), EVERY_ASK)
def test_a_flag_is_refused_after_sglang_resolved(make: Make, name: str, ask: Ask) -> None:
    server_args = make(ask)
    if ask.stopped:
        with pytest.raises((ValueError, AssertionError, RuntimeError, ImportError)):
            resolve(server_args)
        return
    resolve(server_args)
    refused(server_args, name, ask)


@without_gpu
@pytest.mark.parametrize("why", LET_THROUGH)
def test_what_looks_close_is_let_through(make: Make, why: str) -> None:
    """On plain arguments every condition is asked, so what it reads must exist in this SGLang."""
    server_args = make(Ask(LET_THROUGH[why]))
    refuse_server_args(server_args)
    resolve(server_args)
    refuse_server_args(server_args)


def test_a_renamed_argument_is_an_error_not_a_pass(make: Make) -> None:
    with pytest.raises(HookError, match=r"ServerArgs\.enable_something_renamed"):
        ArgsView(make(Ask())).value("enable_something_renamed")


def test_several_modes_are_all_named_one_line_each(make: Make) -> None:
    with pytest.raises(UnsupportedModesError) as caught:
        refuse_server_args(make(Ask("--tp-size 2 --pp-size 3 --enable-lmcache")))
    first_words = [line.split(" is not supported: ")[0] for line in str(caught.value).splitlines()]
    assert sorted(first_words) == ["--enable-lmcache", "--pp-size 3", "--tp-size 2"]
    assert caught.value.flag == first_words[0]


def test_a_choice_of_sglang_is_refused_and_called_so(make: Make) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    server_args = make(Ask())
    declare_resolution(server_args, "test", attention_backend="fa3")
    with pytest.raises(UnsupportedModesError, match=r"fa3 \(SGLang's choice here\)"):
        refuse_server_args(server_args)


def test_a_choice_of_sglang_reaches_the_scheduler_process(make: Make) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    server_args = make(Ask())
    server_args.resolve_once()
    declare_resolution(server_args, "test", kv_cache_dtype="fp8_e4m3")
    with pytest.raises(UnsupportedModesError, match="--kv-cache-dtype fp8_e4m3"):
        refuse_server_args(pickle.loads(pickle.dumps(server_args)))


def test_a_long_value_is_shortened(make: Make) -> None:
    (hit,) = server_args_hits(make(Ask(f"--speculative-algorithm {'X' * 10_000}")))
    assert len(hit.flag) <= len(flag_of("speculative_algorithm")) + 1 + MAX_SHOWN


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"enable_torch_compile": 1}, "torch-compile"),
        ({"enable_hierarchical_cache": 1}, "hicache"),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, "full-prefill-graph"),
    ],
)
@pytest.mark.usefixtures("_environment")
def test_the_engine_takes_more_types_than_the_command_line(
    tmp_path: Path, fields: dict[str, Any], rule: str
) -> None:
    from sglang.srt.server_args import ServerArgs

    (tmp_path / "config.json").write_text(json.dumps(PLAIN_MODEL))
    hits = server_args_hits(ServerArgs(model_path=str(tmp_path), device="cpu", **fields))
    assert rule in {hit.rule for hit in hits}


def test_rocm_is_refused_though_pytorch_calls_it_cuda(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = make(Ask("--device cuda"))
    assert "device" not in {hit.rule for hit in server_args_hits(arguments)}
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "device" in {hit.rule for hit in server_args_hits(arguments)}
