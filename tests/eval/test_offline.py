"""The step benchmarks end to end on a small random model: every arm chooses the same tokens."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

from vtoken_sglang_eval.bench.decode_attention import CELLS, main, parse_cells
from vtoken_sglang_eval.bench.decode_summary import FIGURE_CELLS, Cell, figures_document


def run_bench(out: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable,
            *("-m", "vtoken_sglang_eval.bench.decode_attention", "--small-llama"),
            *("--out", str(out), *words),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize("page_size", [1, 16])
def test_arms_choose_the_same_tokens(tmp_path: Path, page_size: int) -> None:
    result = run_bench(
        tmp_path / "result.json",
        *("--cells", "3x40,1x700", "--repeats", "3", "--decoded", "8"),
        *("--page-size", str(page_size)),
    )
    cells = result["cells"]
    assert [(cell["batch"], cell["context"]) for cell in cells] == [(3, 40), (1, 700)]
    for cell in cells:
        assert cell["token_mismatches"] == {"native": 0, "hook-only": 0}
        assert cell["state_bytes_per_step"] == cell["batch"] * cell["context"] * 6 * 2 * 288 * 4
        for arm in cell["arms"].values():
            assert 0 < arm["attention_ms"]["median"] < arm["step_ms"]["median"]
    assert figures_document(result)["figures"] == {}
    cells[0] |= {"batch": 32, "context": 256}
    figures = figures_document(result)["figures"]
    assert {name: figure["value"] for name, figure in figures.items()} == {
        "cpu_decode_ratio_bs32_ctx256": cells[0]["speed_ratios"]["hook_only_vs_stock"]["median"],
        "hook_only_step_ratio_bs32_ctx256": cells[0]["speed_ratios"]["hook_only_vs_native"][
            "median"
        ],
    }


def test_what_is_measured_by_default_is_what_is_published() -> None:
    assert {(cell.batch, cell.context) for cell in parse_cells(CELLS)} == set(FIGURE_CELLS)


def test_cells_are_parsed_or_refused() -> None:
    assert parse_cells("8x256,1x2048") == (Cell(8, 256), Cell(1, 2048))
    for text in ("8", "8x", "8x2x2", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="cells"):
            parse_cells(text)


def test_results_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    out.write_text("{}")
    assert main(["--out", str(out)]) == 2
    assert "exists" in capsys.readouterr().err
    assert out.read_text() == "{}"
