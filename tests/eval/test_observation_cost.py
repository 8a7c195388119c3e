"""Figures of what observation costs: ratios within pairs."""

from __future__ import annotations

import pytest
from vtoken_sglang_eval.bench.observation_cost import BASE, OBSERVED, SETTINGS, figures_of, main


def test_ratios_are_taken_within_pairs() -> None:
    times = {
        f"step_{OBSERVED}": [0.11, 0.24, 0.33],
        f"step_{BASE}": [0.1, 0.2, 0.3],
        f"prompt_{OBSERVED}": [2.0, 2.0, 2.0],
        f"prompt_{BASE}": [1.0, 1.0, 4.0],
    }
    figures = figures_of("all", times)
    assert figures["observe_cost_all"]["value"] == pytest.approx(1.1)
    assert figures["observe_cost_all"]["spread"]["max"] == pytest.approx(1.2)
    assert figures["observe_prompt_cost_all"]["value"] == pytest.approx(2.0)
    assert figures["observe_base_step_ms_all"]["value"] == pytest.approx(200.0)


def test_an_unknown_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", "x.json", "--settings", "all,most"])
    assert "unknown most" in capsys.readouterr().err
    assert set(SETTINGS) >= {"all", "last", "every4"}
