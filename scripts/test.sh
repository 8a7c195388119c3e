#!/usr/bin/env bash
# Set up and run every check: lint, types, unit tests, tests against real served engines.
# Arguments go to pytest: scripts/test.sh -k config; scripts/test.sh -m "not server".
# shellcheck source=scripts/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

show_help "$@"

echo "Tests of vtoken_sglang: roughly 30 min on two idle cores, most of it starting servers."
step "Python environment" "5 s" use_environment
step "install SGLang and this package, 9.5 GB" "1 min the first time, then seconds" install dev
step "model for the tests: SmolLM2-135M-Instruct, 270 MB" "30-45 s the first time" \
    "$BIN/python" -m vtoken_sglang_eval.models smollm2
step "cache bytecode of SGLang" "45 s the first time" cache_bytecode
step "ruff" "1 s" "$BIN/ruff" check .
step "ruff format" "1 s" "$BIN/ruff" format --check .
step "mypy" "40 s the first time" "$BIN/mypy"
step "pytest, fast tests first, then one server after the other" "roughly 25 min" \
    "$BIN/python" -m pytest "$@"
