"""Decode steps of a whole model on stock torch_native and on our CPU backend, in one process.

`python -m vtoken_sglang_eval.bench.decode_attention --out FILE [--figures FILE]`

Every step of a batch runs on each arm in turn, over the same pool, slots and tokens, in an order
that rotates from step to step; a ratio is taken per step. A step is forward and sampling of one
token per request: the whole decode step except the scheduler's own bookkeeping. The attention
backend's share of it is measured inside. Prompts are not computed (K and V are random), so long
contexts are cheap to set up. Peak memory is the model plus the largest batch's KV.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.bench.decode_summary import (
    ARMS,
    Cell,
    describe,
    figures_document,
    summarize_cell,
)
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.results import rounded

if TYPE_CHECKING:
    from vtoken_sglang_eval.bench.offline import OfflineDecoder, StepTime

CELLS = "1x256,8x256,32x256,1x2048,8x2048,32x2048,1x8192,8x8192"
SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""15M parameters, one K/V head per query head: another geometry, and little but attention."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m vtoken_sglang_eval.bench.decode_attention")
    add = top.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="JSON result; must not exist")
    add("--figures", type=Path, metavar="FILE", help="also merge the figures into this file")
    add("--force", action="store_true", help="let --figures replace a larger measurement")
    add("--model", metavar="PATH", help="default: SmolLM2-135M-Instruct")
    add("--small-llama", action="store_true", help="a random 15M Llama instead of --model")
    add("--cells", type=parse_cells, default=parse_cells(CELLS), metavar="BxL,...")
    add("--repeats", type=int, default=9, metavar="N", help="measured steps per cell")
    add("--decoded", type=int, default=64, metavar="N", help="tokens decoded before measuring")
    add("--page-size", type=int, default=1, metavar="P")
    add("--threads", type=int, default=1, metavar="N")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    return top


def parse_cells(text: str) -> tuple[Cell, ...]:
    """ "8x256,1x2048" as cells.

    Raises:
        argparse.ArgumentTypeError: not of that form.
    """
    try:
        return tuple(Cell(*map(int, word.split("x"))) for word in text.split(","))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cells: BxL,BxL,... needed, got {text!r}") from error


def measure_cell(
    decoder: OfflineDecoder, cell: Cell, repeats: int, decoded: int
) -> list[dict[str, StepTime]]:
    """Steps of one cell, the last at full context; the first step is a warm-up and left out."""
    prefix = cell.context - repeats - 1
    decoder.start_batch(cell.batch, prefix, min(decoded, prefix - 1))
    tokens = [1] * cell.batch
    steps = []
    for index in range(repeats + 1):
        decoder.advance(tokens)
        turn = index % len(ARMS)
        times = {arm: decoder.step(arm) for arm in ARMS[turn:] + ARMS[:turn]}
        tokens = list(times["stock"].tokens)
        steps.append({arm: times[arm] for arm in ARMS})
    return steps[1:]


def load_decoder(options: argparse.Namespace) -> OfflineDecoder:
    """The model that the options name, with a pool for the largest cell."""
    from vtoken_sglang_eval.bench.offline import OfflineDecoder
    from vtoken_sglang_eval.models import ensure_smollm2

    page = options.page_size
    pool = max(cell.batch * (-(-cell.context // page) + 1) * page for cell in options.cells)
    settings = {
        "dtype": options.dtype,
        "pool_tokens": pool,
        "page_size": page,
        "threads": options.threads,
    }
    if not options.small_llama:
        return OfflineDecoder(str(options.model or ensure_smollm2()), **settings)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL_LLAMA), encoding="utf-8")
        return OfflineDecoder(folder, load_format="dummy", **settings)


def measure(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """The whole grid as one result document."""
    from vtoken_sglang_eval.bench.memory_bandwidth import measure_bandwidth

    decoder = load_decoder(options)
    bandwidth = measure_bandwidth(options.repeats)
    read = 1e9 * bandwidth["read_gb_s"]["median"]
    cells = []
    for cell in options.cells:
        steps = measure_cell(decoder, cell, options.repeats, options.decoded)
        summary = summarize_cell(
            cell, steps, decoder.kv_bytes_per_token, decoder.weight_bytes, read
        )
        print(describe(summary), file=sys.stderr, flush=True)
        cells.append(summary)
    name = "small-llama" if options.small_llama else Path(options.model or "smollm2").name
    return {
        "format": "vtoken-sglang-bench/decode_attention/1",
        "command": command,
        "commit": provenance.git_commit(),
        "machine": provenance.machine("cpu"),
        "versions": provenance.versions(),
        "settings": {
            "model": name,
            "dtype": options.dtype,
            "page_size": options.page_size,
            "threads": options.threads,
            "decoded": options.decoded,
        },
        "repeats": options.repeats,
        "memory_bandwidth": bandwidth,
        "cells": cells,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result, and merge the figures if asked for."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    if options.out.exists():
        print(f"--out {options.out}: exists, results are not overwritten", file=sys.stderr)
        return 2
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when torch is imported
    command = provenance.portable_command(
        ["python", "-m", "vtoken_sglang_eval.bench.decode_attention", *words]
    )
    result = rounded(measure(options, command))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.figures is not None:
        write_figures(options.figures, figures_document(result), options.force)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
