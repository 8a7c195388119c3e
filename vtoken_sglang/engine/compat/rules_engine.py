"""Refused arguments that change how requests are scheduled, split over devices, or let in."""

from __future__ import annotations

from vtoken_sglang.engine.compat.rule import Ask, Rule, Trigger
from vtoken_sglang.engine.compat.triggers import (
    any_of,
    ask,
    attention_dp,
    differs,
    environment,
    more_than_one,
    speculative,
    switch,
)

ENGINE_RULES: tuple[Rule, ...] = (
    Rule(
        name="speculative",
        flag="--speculative-algorithm, --decoupled-spec-role",
        trigger=any_of(
            Trigger(
                fields=("speculative_algorithm", "enable_return_aux_hidden_states"),
                find=speculative,
            ),
            differs("decoupled_spec_role", "--decoupled-spec-role", "null"),
        ),
        reason="draft and verify steps allocate slots ahead and roll them back",
        remedy="drop the --speculative-* flags",
        asks=(ask("--speculative-algorithm NGRAM"), ask("--decoupled-spec-role verifier")),
    ),
    Rule(
        name="pd-disaggregation",
        flag="--disaggregation-mode, --enable-pd-role-switch",
        trigger=any_of(
            differs("disaggregation_mode", "--disaggregation-mode", "null"),
            switch("enable_pd_role_switch", "--enable-pd-role-switch"),
        ),
        reason="KV is sent between servers by row, which a pruned row cannot describe",
        remedy="run prefill and decode in one server",
        asks=(
            ask("--disaggregation-mode decode"),
            ask("--disaggregation-mode prefill"),
            ask("--enable-pd-role-switch"),
        ),
    ),
    Rule(
        name="encoder-disaggregation",
        flag="--encoder-only, --language-only",
        trigger=any_of(
            switch("encoder_only", "--encoder-only"), switch("language_only", "--language-only")
        ),
        reason="the server is one half of a multimodal pair",
        remedy="serve a text model in one server",
        asks=(ask("--encoder-only", stopped=True), ask("--language-only", stopped=True)),
    ),
    Rule(
        name="decode-context-parallel",
        flag="--dcp-size",
        trigger=more_than_one("dcp_size", "--dcp-size"),
        reason="a row names slots of several ranks",
        remedy="leave --dcp-size at 1; use --dp-size for more devices",
        asks=(ask("--dcp-size 2"),),
    ),
    Rule(
        name="prefill-context-parallel",
        flag="--attn-cp-size, --enable-prefill-cp",
        trigger=any_of(
            more_than_one("attn_cp_size", "--attn-cp-size"),
            switch("enable_prefill_cp", "--enable-prefill-cp"),
        ),
        reason="the tokens of one prompt lie on several ranks",
        remedy="leave --attn-cp-size at 1; use --dp-size for more devices",
        asks=(
            ask("--attn-cp-size 2", stopped=True),
            ask("--enable-prefill-cp", stopped=True),
        ),
    ),
    Rule(
        name="tensor-parallel",
        flag="--tp-size",
        trigger=more_than_one("tp_size", "--tp-size"),
        reason=(
            "ranks must free the same pages in the same step, but a finished copy is seen at "
            "different times and scores differ by head"
        ),
        remedy="use --dp-size, one model copy per device",
        asks=(ask("--tp-size 2"),),
    ),
    Rule(
        name="pipeline-parallel",
        flag="--pp-size",
        trigger=more_than_one("pp_size", "--pp-size"),
        reason="several micro-batches are in flight, the safe point knows one",
        remedy="leave --pp-size at 1; use --dp-size for more devices",
        asks=(ask("--pp-size 2"),),
    ),
    Rule(
        name="attention-dp",
        flag="--attn-dp-size, --enable-dp-attention",
        trigger=Trigger(
            fields=("attn_dp_size", "enable_dp_attention", "ep_join_mode"), find=attention_dp
        ),
        reason="batches are padded and synchronised across schedulers that prune independently",
        remedy="use --dp-size alone: independent schedulers are supported",
        asks=(
            ask("--attn-dp-size 2", stopped=True),
            ask("--dp-size 2 --enable-dp-attention", stopped=True),
        ),
    ),
    Rule(
        name="two-batch-overlap",
        flag="--enable-two-batch-overlap",
        trigger=switch("enable_two_batch_overlap", "--enable-two-batch-overlap"),
        reason="one forward becomes two that share rows",
        remedy="drop the flag",
        asks=(ask("--enable-two-batch-overlap", stopped=True),),
    ),
    Rule(
        name="pd-multiplexing",
        flag="--enable-pdmux",
        trigger=switch("enable_pdmux", "--enable-pdmux"),
        reason="prefill and decode run on separate streams, the copy fence follows one",
        remedy="drop the flag",
        asks=(ask("--enable-pdmux", stopped=True),),
    ),
    Rule(
        name="diffusion-llm",
        flag="--dllm-algorithm",
        trigger=differs("dllm_algorithm", "--dllm-algorithm", None),
        reason="KV of a block is rewritten until the block is done",
        remedy="serve an autoregressive model",
        asks=(ask("--dllm-algorithm LowConfidence", stopped=True),),
    ),
    Rule(
        name="streaming-session",
        flag="--enable-streaming-session",
        trigger=switch("enable_streaming_session", "--enable-streaming-session"),
        reason="a session keeps a row alive between requests and returns its KV on another path",
        remedy="drop the flag; send the whole conversation, the prefix cache finds it",
        asks=(ask("--enable-streaming-session"),),
    ),
    Rule(
        name="multi-item-scoring",
        flag="--enable-mis",
        trigger=switch("enable_mis", "--enable-mis"),
        reason="its attention mask is built for a row without evicted tokens",
        remedy="drop the flag; score one item per request",
        asks=(ask("--enable-mis", stopped=True),),
    ),
    Rule(
        name="deterministic",
        flag="--enable-deterministic-inference, --rl-on-policy-target",
        trigger=any_of(
            switch("enable_deterministic_inference", "--enable-deterministic-inference"),
            differs("rl_on_policy_target", "--rl-on-policy-target", None),
        ),
        reason="a retraction restarts pruning, so output can depend on the load",
        remedy="drop the flag, or serve without --vtoken-policy",
        asks=(
            ask("--enable-deterministic-inference", stopped=True),
            ask("--rl-on-policy-target fsdp", stopped=True),
        ),
    ),
    Rule(
        name="embedding",
        flag="--is-embedding, --prefill-only-disable-kv-cache",
        trigger=any_of(
            switch("is_embedding", "--is-embedding"),
            switch("prefill_only_disable_kv_cache", "--prefill-only-disable-kv-cache"),
        ),
        reason="nothing is decoded, so there is nothing to prune",
        remedy="serve embeddings without --vtoken-policy",
        asks=(
            ask("--is-embedding", also=("not-generating",)),
            ask("--prefill-only-disable-kv-cache", stopped=True),
        ),
    ),
    Rule(
        name="ray",
        flag="--use-ray",
        trigger=switch("use_ray", "--use-ray"),
        reason="the options reach child processes by environment, Ray actors do not inherit it",
        remedy="drop the flag",
        asks=(ask("--use-ray"),),
    ),
    Rule(
        name="request-front-ends",
        flag="--tokenizer-worker-num > 1, --smg-grpc-mode, --grpc-mode, SGLANG_RUST_SERVER=1",
        trigger=any_of(
            more_than_one("tokenizer_worker_num", "--tokenizer-worker-num"),
            switch("smg_grpc_mode", "--smg-grpc-mode"),
            switch("grpc_mode", "--grpc-mode"),
            environment("SGLANG_RUST_SERVER"),
        ),
        reason="requests enter through a process that does not check per-request options",
        remedy="use the HTTP server with one tokenizer worker",
        asks=(
            ask("--tokenizer-worker-num 2"),
            ask("--smg-grpc-mode"),
            ask("--grpc-mode"),
            Ask(environ={"SGLANG_RUST_SERVER": "1"}),
        ),
    ),
)
