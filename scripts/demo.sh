#!/usr/bin/env bash
# Set up and run the main job: a chat of several turns in more sessions than the pool can cache,
# served without eviction (native), with evicted tokens masked, and with their memory given back
# (auto). The last lines say what was gained, what it cost in answers, and where the report is.
# Arguments go to `vtoken-sglang eval study demo`: scripts/demo.sh --repeats 3 --policies tova.
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

show_help "$@"

echo "Demonstration of vtoken_sglang: under 10 min on two idle cores."
step "Python environment" "5 s" use_environment
step "install SGLang and this package, 9.5 GB" "1 min the first time, then seconds" install eval
step "model: SmolLM2-135M-Instruct, 270 MB" "30-45 s the first time" \
    "$BIN/python" -m vtoken_sglang_eval.models smollm2
step "text: ShareGPT conversations, 125 MB" "5 s the first time" \
    "$BIN/python" -m vtoken_sglang_eval.models sharegpt
step "cache bytecode of SGLang" "45 s the first time" cache_bytecode
step "one server, three arms, the same chats and questions" "4-6 min" \
    "$BIN/vtoken-sglang" eval study demo "$@"
