"""The triton backend over rows with holes: SGLang's own kernels, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.interpreted import assert_passes

pytest.importorskip("sglang", reason="needs SGLang")


def test_live_attention_equals_plain_attention() -> None:
    assert_passes(Path(__file__).with_name("interpreted") / "check_attention_triton.py")
