"""Loaded by SGLang in every process: registers the hooks and verifies that each landed."""
