"""Evaluation of vtoken_sglang against a served engine."""
