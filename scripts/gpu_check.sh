#!/usr/bin/env bash
# Check and measure the CUDA path on one GPU; under 8 minutes, nothing is downloaded. Writes
# docs/results/cuda.json (or --out FILE) and prints a table. Without a GPU it measures nothing and
# fails; --dry-run compiles and runs what it can without one.
#
# Needs Python >= 3.11 with torch, triton, numpy and aiohttp; for the FlashInfer parts flashinfer
# as well, whole or as packed by scripts/gpu_carry.py; for the comparison with SGLang's
# index kernel sglang. What is missing is named and left out.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
PYTHON="${PYTHON:-}"
if [ -z "$PYTHON" ]; then
    PYTHON=python3
    [ ! -x "${VIRTUAL_ENV:-$ROOT/.venv}/bin/python" ] || PYTHON="${VIRTUAL_ENV:-$ROOT/.venv}/bin/python"
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

for word in "$@"; do
    if [ "$word" = --dry-run ]; then
        echo "kernels, compiled ahead of time"
        env -u TRITON_INTERPRET "$PYTHON" -m vtoken_sglang_eval.bench.ahead_of_time
        echo "checks, in Triton's interpreter and on the FlashInfer stand-in"
        TRITON_INTERPRET=1 exec "$PYTHON" -m tests.helpers.gpu_dry_run "$@"
    fi
done
exec "$PYTHON" -m eval.bench.gpu_check "$@"
