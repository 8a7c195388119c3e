"""Dry runs with small samples: the same code on tiny data, where model or data cannot be reached.

Requests are built with the default model's tokenizer from committed samples, and shrunk to fit
them. Arms, axes, server commands and the data's formats are those of the real grid, so a wrong
argument, an adaptor that does not fit or an arm that cannot be built shows without a GPU.
"""

from __future__ import annotations

from dataclasses import replace

from .config import EvalConfig
from .grid import Study
from .sources import NEEDS, SAMPLES

FILES = {
    "conversations": "conversations.json",
    "documents": "documents.jsonl",
    "trace": "trace.jsonl",
}
# Upper bounds that the samples are large enough for.
MOST = {
    "conversations": 4,
    "turns": 2,
    "sharing": 2,
    "concurrency": 4,
    "system_tokens": 192,
    "user_tokens": 64,
    "out_tokens": 16,
}


def with_samples(study: Study) -> Study:
    """The study on samples: its name, setting and arms stay, its data and sizes shrink."""
    config = study.config
    small = {name: min(getattr(config, name), most) for name, most in MOST.items()}
    small["sharing"] = small["sharing"] or MOST["sharing"]
    return Study(
        name=study.name,
        setting=study.setting,
        config=replace(config, dataset=_sample(config), length_scale=0.1, **small),
    )


def _sample(config: EvalConfig) -> str | None:
    """The sample of the kind that the study's data is; None for text that is made up anyway."""
    need = NEEDS[config.workload]
    if need == "documents" and config.dataset is None:
        need = "conversations"  # the default there is text of conversations
    return str(SAMPLES / FILES[need]) if need else None
