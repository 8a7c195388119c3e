"""Measurements of single parts, run by hand: `python -m vtoken_sglang_eval.bench.<name>`."""
