#!/usr/bin/env bash
# Set up and run the main job: serve each arm in turn, run the same multi-turn conversations on all
# of them, print a table, write a report. Arguments go to `vtoken-sglang eval quick`:
# scripts/demo.sh --repeats 1 --arms native,hook-only,naive,auto. `vtoken-sglang eval quick --help` lists them.
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

show_help "$@"

echo "Demonstration of vtoken_sglang: about 10 min on two idle cores, most of it starting servers."
step "Python environment" "5 s" use_environment
step "install SGLang and this package, 9.5 GB" "1 min the first time, then seconds" install eval
step "model: SmolLM2-135M-Instruct, 270 MB" "30-45 s the first time" \
    "$BIN/python" -m vtoken_sglang_eval.models smollm2
step "text: ShareGPT conversations, 125 MB" "5 s the first time" \
    "$BIN/python" -m vtoken_sglang_eval.models sharegpt
step "cache bytecode of SGLang" "45 s the first time" cache_bytecode
step "serve each arm, run the workload on it" "5-8 min" \
    "$BIN/vtoken-sglang" eval quick "$@"
