"""What pruning costs in quality: perplexity, needles, recall over turns, RULER, kvpress beside it.

`python -m vtoken_sglang_eval.quality --help`; what was measured and what it means: docs/quality.md.
"""
