"""The keys that looks are timed on are those of a cache: scattered, rotated, the same before."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vtoken_sglang_eval.bench import score_cost

from vtoken_sglang.policy.base import Keys
from vtoken_sglang.policy.names import BUILT_IN

CONFIG = SimpleNamespace(
    head_dim=None, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3
)


def test_keys_have_the_models_shape_and_are_rotated_back_on_request() -> None:
    keys = score_cost.make_keys(CONFIG, 20, torch.Generator().manual_seed(1))
    cached, before = list(keys(Keys.CACHED)), list(keys(Keys.BEFORE_ROTARY))
    assert [each.shape for each in cached] == [each.shape for each in before] == [(20, 2, 8)] * 3
    for with_rotary, without in zip(cached, before, strict=True):
        assert torch.equal(with_rotary[0], without[0])
        assert not torch.allclose(with_rotary[1:], without[1:])
        torch.testing.assert_close(with_rotary.norm(dim=-1), without.norm(dim=-1))


def test_every_policy_has_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_cost.AutoConfig, "from_pretrained", lambda _: CONFIG)
    monkeypatch.setattr(score_cost.provenance, "model_facts", lambda _: {"name": "tiny"})
    out = tmp_path / "policies.json"
    words = ["--out", str(out), "--tokens", "40", "--repeats", "2", "--model", "tiny"]
    assert score_cost.main(words) == 0
    figures = json.loads(out.read_text(encoding="utf-8"))["figures"]
    assert {f"score_ms_{name}_tokens40" for name in BUILT_IN} == figures.keys()
    assert figures["score_ms_keydiff_tokens40"]["value"] > 0
