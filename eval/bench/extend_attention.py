"""One new token after a long cached prefix: an extend step on stock torch_native and on ours.

`python -m vtoken_sglang_eval.bench.extend_attention --out FILE [--figures FILE]`

What a request costs that hits the prefix cache. Stock computes the attention of the whole sequence
anew for it, ours that of the new tokens. Every arm computes the same step in turn, in an order that
rotates, over the same pool, slots and tokens; a ratio is taken per round. K and V of the prefix
are random. Stock steps at 8192 tokens are slow; a few rounds are enough.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.bench.decode_attention import load_decoder
from vtoken_sglang_eval.bench.decode_summary import ARMS, Cell, serve_document
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.metrics import spread
from vtoken_sglang_eval.results import rounded

if TYPE_CHECKING:
    from vtoken_sglang_eval.bench.offline import OfflineDecoder, StepTime

FIGURE_CONTEXT = 8192


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m vtoken_sglang_eval.bench.extend_attention")
    add = top.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="JSON result; must not exist")
    add("--figures", type=Path, metavar="FILE", help="also merge the figure into this file")
    add("--force", action="store_true", help="let --figures replace a larger measurement")
    add("--model", metavar="PATH", help="default: SmolLM2-135M-Instruct")
    add("--small-llama", action="store_true", help="a random 15M Llama instead of --model")
    add("--context", type=int, default=FIGURE_CONTEXT, metavar="L", help="tokens, the new included")
    add("--own", type=int, default=1, metavar="N", help="new tokens")
    add("--repeats", type=int, default=3, metavar="N", help="measured rounds")
    add("--page-size", type=int, default=1, metavar="P")
    add("--threads", type=int, default=1, metavar="N")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    return top


def measure_rounds(
    decoder: OfflineDecoder, context: int, own: int, repeats: int
) -> list[dict[str, StepTime]]:
    """The extend on every arm, `repeats` times; ours runs once before to warm up."""
    decoder.start_extend(1, context - own, own)
    for arm in ARMS[1:]:
        decoder.step(arm)
    rounds = []
    for index in range(repeats):
        turn = index % len(ARMS)
        rounds.append({arm: decoder.step(arm) for arm in ARMS[turn:] + ARMS[:turn]})
    return rounds


def summarize(rounds: Sequence[dict[str, StepTime]]) -> dict[str, Any]:
    """Times, ratios and disagreements of the arms."""
    arms: dict[str, Any] = {}
    for arm in ARMS:
        times = [one[arm] for one in rounds]
        arms[arm] = {
            "step_ms": spread([1000 * time.wall_s for time in times]),
            "attention_ms": spread([1000 * time.attention_wall_s for time in times]),
            "step_cpu_ms": spread([1000 * time.cpu_s for time in times]),
        }
    ratios = {
        arm: spread([one["stock"].wall_s / one[arm].wall_s for one in rounds]) for arm in ARMS[1:]
    }
    others = {
        arm: sum(one[arm].tokens != one["stock"].tokens for one in rounds) for arm in ARMS[1:]
    }
    return {"arms": arms, "stock_over": ratios, "token_mismatches": others}


def measure(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """The measurement as one result document."""
    # SGLang wants a page to spare before it allocates an extend.
    options.cells = (Cell(1, options.context + options.page_size),)
    decoder = load_decoder(options)
    rounds = measure_rounds(decoder, options.context, options.own, options.repeats)
    name = "small-llama" if options.small_llama else Path(options.model or "smollm2").name
    return {
        "format": "vtoken-sglang-bench/extend_attention/1",
        "command": command,
        "commit": provenance.git_commit(),
        "machine": provenance.machine("cpu"),
        "versions": provenance.versions(),
        "settings": {
            "model": name,
            "dtype": options.dtype,
            "page_size": options.page_size,
            "threads": options.threads,
            "cached": options.context - options.own,
            "own": options.own,
        },
        "repeats": options.repeats,
        **summarize(rounds),
    }


def figures_document(result: dict[str, Any]) -> dict[str, Any]:
    """The figure of topic `serve` that a result holds: only that of one new token."""
    own, cached = (result["settings"][key] for key in ("own", "cached"))
    figures = {}
    if (own, cached + own) == (1, FIGURE_CONTEXT):
        ratio = result["stock_over"]["hook-only"]
        figures[f"cpu_extend_ratio_ctx{FIGURE_CONTEXT}"] = {
            "value": ratio["median"],
            "unit": f"stock / hook-only time of an extend of 1 token after {cached} cached",
            "spread": {key: ratio[key] for key in ("min", "q1", "q3", "max")},
        }
    return serve_document(result, figures)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the result, and merge the figure if asked for."""
    words = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    if not 0 < options.own < options.context:
        print(f"--own {options.own}: must be at least 1 and below --context", file=sys.stderr)
        return 2
    if options.out.exists():
        print(f"--out {options.out}: exists, results are not overwritten", file=sys.stderr)
        return 2
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # read when torch is imported
    command = provenance.portable_command(
        ["python", "-m", "vtoken_sglang_eval.bench.extend_attention", *words]
    )
    result = rounded(measure(options, command))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for arm, found in result["arms"].items():
        print(f"{arm}: step {found['step_ms']['median']:.1f} ms", file=sys.stderr)
    if options.figures is not None:
        write_figures(options.figures, figures_document(result), options.force)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
