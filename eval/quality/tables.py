"""The tables of docs/quality.md, written from a figures document between marks in the text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vtoken_sglang_eval.markdown import table

from .cells import KEEPS, policy_names
from .peer import PRESSES

KINDS: Final = {"needle": "needles", "recall": "recall over turns", "ruler": "RULER"}
PLACEMENTS: Final = {"after": "question seen", "before": "question not seen"}


def tables(document: Mapping[str, Any]) -> dict[str, str]:
    """Markdown by the name of its mark; what was not measured is left out."""
    figures = document["figures"]
    found: dict[str, str] = {}
    if "perplexity_full" in figures:
        found["perplexity"] = _perplexity(figures)
    asked = [kind for kind in KINDS if f"{kind}_after_full" in figures]
    if asked:
        found["questions"] = _questions(figures)
    if "kvpress_gap_full" in figures:
        found["kvpress"] = _kvpress(figures)
    if "served_eviction_mismatches" in figures:
        found["served"] = _served(figures)
    if any(name.startswith("reuse_prefix_scores_") for name in figures):
        found["seeds"] = _seeds(figures)
    return found


def _names(policy: str) -> list[str]:
    return [f"{policy}_keep{round(100 * keep)}" for keep in KEEPS]


def _measured(figures: Mapping[str, Any], prefix: str) -> list[str]:
    """Policies that the figures have; one that came later was not measured with the others."""
    return [policy for policy in policy_names() if f"{prefix}_{_names(policy)[0]}" in figures]


def _perplexity(figures: Mapping[str, Any]) -> str:
    head = ["policy", *(f"keep {keep:g}" for keep in KEEPS)]
    rows = []
    for policy in _measured(figures, "perplexity_ratio"):
        ratios = [figures[f"perplexity_ratio_{name}"] for name in _names(policy)]
        rows.append(
            [
                policy,
                *(
                    f"{one['value']:.2f} ({one['spread']['q1']:.2f} to {one['spread']['q3']:.2f})"
                    for one in ratios
                ),
            ]
        )
    full = figures["perplexity_full"]
    title = (
        f"Perplexity over full attention's, which is {full['value']:.1f}, on "
        f"{full['spread']['texts']:.0f} texts: geometric mean, in brackets the middle half of them."
    )
    return f"{title}\n\n{table(head, rows)}"


def _questions(figures: Mapping[str, Any]) -> str:
    columns = [
        (kind, place) for kind in KINDS for place in PLACEMENTS if f"{kind}_{place}_full" in figures
    ]
    head = ["policy", *(f"{KINDS[kind]}, {PLACEMENTS[place]}" for kind, place in columns)]
    rows = [
        ["full attention", *(_percent(figures[f"{kind}_{place}_full"]) for kind, place in columns)]
    ]
    for policy in _measured(figures, "{}_{}".format(*columns[0])):
        cells = [
            " / ".join(_percent(figures[f"{kind}_{place}_{name}"]) for name in _names(policy))
            for kind, place in columns
        ]
        rows.append([policy, *cells])
    counts = ", ".join(
        f"{KINDS[kind]} {figures[f'{kind}_after_full']['spread']['count']}"
        for kind in KINDS
        if f"{kind}_after_full" in figures
    )
    keeps = " / ".join(f"{keep:g}" for keep in KEEPS)
    return f"Percent right at keep {keeps}; questions: {counts}.\n\n{table(head, rows)}"


def _percent(figure: Mapping[str, Any]) -> str:
    return f"{100 * figure['value']:.0f}"


def _kvpress(figures: Mapping[str, Any]) -> str:
    head = ["policy", "perplexity, ours", "kvpress", "gap, nats per token", "needles, ours",
            "kvpress"]  # fmt: skip
    rows = []
    for label, policy in {"full attention": "full", **{name: name for name in PRESSES}}.items():
        name = policy if policy == "full" else f"{policy}_keep50"
        gap = figures[f"kvpress_gap_{name}"]
        error = gap["spread"]["standard_error"] or 0.0
        right = [figures.get(f"once_needle_{side}_{name}") for side in ("ours", "kvpress")]
        texts = [figures[f"once_perplexity_{side}_{name}"] for side in ("ours", "kvpress")]
        needles = ["-" if one is None else _percent(one) for one in right]
        rows.append(
            [
                label,
                *(f"{one['value']:.2f}" for one in texts),
                f"{gap['value']:+.3f} ± {error:.3f}",
                *needles,
            ]
        )
    full = figures["kvpress_gap_full"]["spread"]
    needles = figures.get("once_needle_ours_full", {"spread": {"count": 0}})["spread"]
    counts = f"{full['texts']:.0f} texts, {needles['count']:.0f} needles."
    return f"{counts}\n\n{table(head, rows)}"


def _served(figures: Mapping[str, Any]) -> str:
    evictions, answers = figures["served_eviction_mismatches"], figures["served_answer_mismatches"]
    everything = figures["served_keep100_mismatches"]
    return (
        f"{evictions['spread']['requests']} served requests: of "
        f"{evictions['spread']['tokens_evicted']} tokens evicted at the first "
        f"look, {evictions['value']:.0f} differ from the reference; "
        f"{answers['value']:.0f} answers differ. {everything['spread']['requests']} requests "
        f"with keep 1.0: {everything['value']:.0f} lost a token or answered otherwise than "
        "full attention."
    )


def _seeds(figures: Mapping[str, Any]) -> str:
    cells = sorted(
        name.removeprefix("reuse_prefix_scores_on_recall_")
        for name in figures
        if name.startswith("reuse_prefix_scores_on_recall_")
    )
    rows = []
    for cell in cells:
        switched = [
            figures[f"reuse_prefix_scores_{switch}_recall_{cell}"] for switch in ("on", "off")
        ]
        count = switched[0]["spread"]["count"]
        rows.append([cell, *map(_percent, switched), f"{count:.0f}"])
    return table(["policy", "handed on, percent right", "not", "questions"], rows)
