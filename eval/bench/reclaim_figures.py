"""Pages that pruned requests hold on a served engine, reclaimed against only masked.

    python -m vtoken_sglang_eval.bench.reclaim_figures --out docs/results/core.json

Real multi-turn conversations, one request at a time so that every number is of one request, not
published to the prefix cache. Both arms get the same requests and make the same evictions; a
request is looked at between steps, as often as the server answers. Cells are (policy, keep); per
page size two servers answer all of them. Names of the figures, per cell and page size:

  retained_ratio  pages held (destinations of copies included), reclaim / naive, means over looks
  f_after         waste right after a repack was committed; over all looks where none was needed
  limit_gap       retained / ceil(live / page size) - 1, at the same looks as f_after
  f_mean, f_naive waste over all looks, reclaim and naive

With --core-bench FILE the figures of the engine-free bench that belong to the topic are merged too,
with their own provenance.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.bench.served_looks import EvictionPlan, PrunedServer, Request
from vtoken_sglang_eval.chat import ModelTokenizer
from vtoken_sglang_eval.errors import DatasetError, FiguresError
from vtoken_sglang_eval.figures import read_figures, write_figures
from vtoken_sglang_eval.metrics import figure
from vtoken_sglang_eval.models import ensure_smollm2
from vtoken_sglang_eval.sharegpt import Conversation, Dataset, find_dataset, load_dataset

POLICIES = ("random", "streaming_llm")
KEEPS = (30, 50, 70)
SHORTEST, LONGEST = 768, 1152
ANSWER = 48
PER_REPEAT = 1
INTERVAL, SINK, RECENT = 16, 4, 32
FROM_CORE_BENCH = ("planner_step_share", "copy_ratio")  # must be there
CORE_BENCH_PREFIXES = ("planner_", "copy_")
Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Means over one arm's looks at the requests of one cell and repeat.

    Fields:
        retained: pages held, destinations of pending copies included.
        waste, waste_after: F over all looks / right after a commit (over all if there was none).
        limit_gap: retained over the fewest pages the live tokens fit into, less 1.
        evicted: tokens evicted. answers: generated ids per request.
    """

    retained: float
    waste: float
    waste_after: float
    limit_gap: float
    evicted: int
    answers: list[list[int]]


def conversation_text(conversation: Conversation, tokenizer: ModelTokenizer) -> list[int]:
    """The whole conversation as the model's chat template writes it."""
    turns = zip(conversation.user_turns, conversation.assistant_turns, strict=False)
    messages = []
    for user, assistant in turns:
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ]
    return tokenizer.encode(tokenizer.render(messages))


def make_prompts(dataset: Dataset, tokenizer: ModelTokenizer, count: int, seed: int) -> list[Any]:
    """`count` different conversations of at least two turns, each cut to a length drawn between
    SHORTEST and LONGEST. Raises DatasetError when the file has too few that are long enough."""
    random = np.random.default_rng(seed)
    lengths = random.integers(SHORTEST, LONGEST + 1, count).tolist()
    prompts: list[list[int]] = []
    for at in random.permutation(len(dataset.conversations)).tolist():
        conversation = dataset.conversations[at]
        # A token is at most a few characters: texts far too short or long are not worth encoding.
        size = sum(map(len, (*conversation.user_turns, *conversation.assistant_turns)))
        if len(conversation.user_turns) < 2 or not 4 * SHORTEST < size < 16 * LONGEST:
            continue
        tokens = conversation_text(conversation, tokenizer)
        if len(tokens) >= lengths[len(prompts)]:
            prompts.append(tokens[: lengths[len(prompts)]])
        if len(prompts) == count:
            return prompts
    raise DatasetError(f"{dataset.name}: fewer than {count} conversations are long enough")


def held(looks: Sequence[Sequence[EvictionPlan]], page_size: int, answers: list[list[int]]) -> Held:
    """Averages over looks, per request in order. Raises FiguresError when one was never seen."""
    retained, waste, gaps, after, gaps_after = [], [], [], [], []
    evicted = 0
    for seen in looks:
        pruned = [look for look in seen if look.pruned_rows == 1]
        if not pruned:
            raise FiguresError("figures: a request ended before it was seen pruned")
        evicted += seen[-1].evicted - seen[0].evicted
        for before, look in zip([seen[0], *pruned], pruned, strict=False):
            retained.append(look.retained + look.held)
            waste.append(1 - look.live / (look.retained * page_size))
            gaps.append(look.retained / -(-look.live // page_size) - 1)
            if look.repacks > before.repacks:
                after.append(waste[-1])
                gaps_after.append(gaps[-1])
    return Held(
        retained=float(np.mean(retained)),
        waste=float(np.mean(waste)),
        waste_after=float(np.mean(after or waste)),
        limit_gap=float(np.mean(gaps_after or gaps)),
        evicted=evicted,
        answers=answers,
    )


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold a lock file, so that measurements on one machine do not disturb each other."""
    if path is None:
        yield
        return
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def serve_arm(
    arm: str,
    page_size: int,
    prompts: Sequence[Sequence[list[int]]],
    model: str,
    lock: Path | None = None,
) -> dict[tuple[str, int, int], Held]:
    """One server: every cell over the prompts of every repeat, by (policy, keep, repeat)."""
    found: dict[tuple[str, int, int], Held] = {}
    with (
        locked(lock),
        tempfile.TemporaryDirectory() as folder,
        PrunedServer(
            "naive" if arm == "naive" else "", page_size, model, Path(folder) / "server.log"
        ) as server,
    ):
        for repeat, batch in enumerate(prompts):
            for policy in POLICIES:
                for keep in KEEPS:
                    options = {
                        "policy": policy,
                        "keep": keep / 100,
                        "interval": INTERVAL,
                        "sink": SINK,
                        "recent": RECENT,
                        "seed": repeat,
                    }
                    looks, answers = [], []
                    for prompt in batch:
                        answer, seen = server.follow(Request(prompt, ANSWER, options))
                        answers.append(answer)
                        looks.append(seen)
                    found[policy, keep, repeat] = held(looks, page_size, answers)
                    print(f"  {arm} p{page_size} {policy} keep{keep} repeat {repeat}", flush=True)
    return found


def figures_of(
    page_size: int,
    naive: dict[tuple[str, int, int], Held],
    ours: dict[tuple[str, int, int], Held],
    repeats: int,
) -> Figures:
    """The figures of one page size. Raises FiguresError when the arms evicted different tokens."""
    for key in naive:
        if naive[key].evicted != ours[key].evicted or not naive[key].evicted:
            raise FiguresError(f"figures: {key}: the arms did not eviction the same tokens")
    wrong = sum(
        a != b for key in naive for a, b in zip(naive[key].answers, ours[key].answers, strict=True)
    )
    found = {f"answer_mismatches_p{page_size}": figure([wrong], "answers that differ between arms")}
    for policy in POLICIES:
        for keep in KEEPS:
            cells = [(naive[policy, keep, r], ours[policy, keep, r]) for r in range(repeats)]
            name = f"{policy}_keep{keep}_p{page_size}"
            ratios = [mine.retained / other.retained for other, mine in cells]
            found[f"retained_ratio_{name}"] = figure(ratios, "pages held, reclaim / naive")
            found[f"f_after_{name}"] = figure([mine.waste_after for _, mine in cells], "share")
            found[f"limit_gap_{name}"] = figure([mine.limit_gap for _, mine in cells], "share")
            found[f"f_mean_{name}"] = figure([mine.waste for _, mine in cells], "share")
            found[f"f_naive_{name}"] = figure([other.waste for other, _ in cells], "share")
    return found


def core_bench_document(path: Path) -> dict[str, Any]:
    """Planner and copy figures of the engine-free bench, with their provenance.

    Raises FiguresError when the file or a figure that this topic names is missing.
    """
    document = read_figures(path)
    if document is None:
        raise FiguresError(f"{path}: no such file")
    missing = [name for name in FROM_CORE_BENCH if name not in document["figures"]]
    if missing:
        raise FiguresError(f"{path}: lacks {', '.join(missing)}")
    chosen = {
        name: entry
        for name, entry in document["figures"].items()
        if name.startswith(CORE_BENCH_PREFIXES)
    }
    return {**document, "topic": "core", "figures": chosen}


def document_of(words: Sequence[str], chosen: Any, settings: Any, figures: Figures) -> Any:
    module = "vtoken_sglang_eval.bench.reclaim_figures"
    return {
        "topic": "core",
        **provenance.figures_head(module, words),
        "settings": settings,
        "repeats": chosen.repeats,
        "figures": figures,
    }


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="figures file, topic core")
    parser.add_argument(
        "--page-sizes", default="1,16,64", metavar="N,N", help="default: 1,16,64; '' for none"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--dataset", help="ShareGPT-format JSON file")
    parser.add_argument("--lock", type=Path, help="file to lock while a server runs")
    parser.add_argument("--core-bench", type=Path, help="figures file of core_bench to merge")
    parser.add_argument("--force", action="store_true", help="replace a larger measurement")
    chosen = parser.parse_args(words)
    arguments = sys.argv[1:] if words is None else list(words)
    model = chosen.model or str(ensure_smollm2())
    dataset = load_dataset(find_dataset(chosen.dataset))
    count = PER_REPEAT * chosen.repeats
    flat = make_prompts(dataset, ModelTokenizer(model), count, chosen.seed)
    prompts = [flat[at : at + PER_REPEAT] for at in range(0, count, PER_REPEAT)]
    settings = {
        "model": provenance.model_facts(model)["name"],
        "dataset": dataset.name,
        "dtype": "float32",
        "requests": PER_REPEAT,
        "prompt_tokens": f"{SHORTEST} to {LONGEST}",
        "answer_tokens": ANSWER,
        "interval": INTERVAL,
        "sink": SINK,
        "recent": RECENT,
        "publish": "never",
        "seed": chosen.seed,
        "patch_series": provenance.patch_series_hash(),
    }
    for page_size in map(int, filter(None, chosen.page_sizes.split(","))):
        naive = serve_arm("naive", page_size, prompts, model, chosen.lock)
        ours = serve_arm("reclaim", page_size, prompts, model, chosen.lock)
        found = figures_of(page_size, naive, ours, chosen.repeats)
        document = document_of(arguments, chosen, settings, found)
        write_figures(chosen.out, document, chosen.force)
        for name, entry in found.items():
            print(f"{name:48} {entry['value']:.4g} {entry['unit']}")
    if chosen.core_bench is not None:
        write_figures(chosen.out, core_bench_document(chosen.core_bench), chosen.force)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
