"""RULER's own generator, run with the interpreter of an environment that has it.

    python ruler_make.py --model FOLDER --out DIR --length 1024 --samples 4

Writes DIR/TASK/validation.jsonl. The environment needs `nvidia-long-context-eval` (its generator is
RULER's, Apache-2.0), `wonderwords`, `transformers`, and `nupunkt` in place of the sentence splitter
whose data nltk would fetch. Needs nothing of this project, so it is a script and not a module.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import long_context_eval  # type: ignore[import-not-found, unused-ignore]
import nltk.tokenize  # type: ignore[import-not-found, import-untyped, unused-ignore]
import nupunkt  # type: ignore[import-not-found, unused-ignore]
import yaml
from long_context_eval.data.synthetic.constants import (  # type: ignore[import-not-found, unused-ignore]
    TASKS,
)

CHOSEN = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "vt")
# Room that a prompt leaves for the answer, in tokens.
TO_GENERATE = 40


def make(task: str, settings: dict[str, Any], chosen: argparse.Namespace, root: Path) -> None:
    """Run the generator of one task as its command line would."""
    kind = TASKS[settings["task"]]
    arguments = {
        "save_dir": chosen.out,
        "save_name": task,
        "subset": "validation",
        "tokenizer_path": chosen.model,
        "tokenizer_type": "hf",
        "max_seq_length": chosen.length,
        "tokens_to_generate": TO_GENERATE,
        "num_samples": chosen.samples,
        "random_seed": chosen.seed,
        "template": kind["template"] + kind.get("answer_prefix", ""),
        **settings.get("args", {}),
    }
    script = root / "data" / "synthetic" / f"{settings['task']}.py"
    sys.argv = [str(script)]
    for name, value in arguments.items():
        sys.argv += [f"--{name}", str(value)]
    sys.path.insert(0, str(script.parent))  # as when run as a program
    runpy.run_path(str(script), run_name="__main__")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="local model folder, for its tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024, help="tokens, the answer included")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--tasks", default=",".join(CHOSEN))
    chosen = parser.parse_args()
    nltk.tokenize.sent_tokenize = nupunkt.sent_tokenize
    root = Path(long_context_eval.__file__).parent
    everything = yaml.safe_load((root / "synthetic.yaml").read_text("utf-8"))
    for task in chosen.tasks.split(","):
        make(task, everything[task], chosen, root)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
