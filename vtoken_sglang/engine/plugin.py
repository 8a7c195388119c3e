"""Entry point of the `sglang.srt.plugins` group. Called once in every SGLang process."""

from __future__ import annotations


def load() -> None:
    """Register hooks for this process. (Filled in by the seams module.)"""
