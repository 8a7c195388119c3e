"""Tables of the docs: made from figures files alone, and the committed texts show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.bench.capacity_figures import figures_of as capacity_figures
from vtoken_sglang_eval.bench.capacity_parts import OUTPUT_POOLS, POOLS
from vtoken_sglang_eval.bench.sharing_figures import GRIDS
from vtoken_sglang_eval.bench.sharing_figures import figures_of as sharing_figures
from vtoken_sglang_eval.doc_tables import doc_tables
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.main import main
from vtoken_sglang_eval.markdown import fill, fill_file, table
from vtoken_sglang_eval.quality import tables as quality_tables
from vtoken_sglang_eval.rows import eval_document

from tests.eval.builders import record, result_of, run_of
from tests.eval.test_capacity_figures import lines
from tests.eval.test_sharing_figures import runs_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXTS = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


def sharing_document(grid: str) -> dict[str, Any]:
    return {"topic": "cow", "figures": sharing_figures(GRIDS[grid], runs_of(grid), f"_{grid}")}


def capacity_document() -> dict[str, Any]:
    settings = {"pools": {"prompt_heavy": POOLS, "output_heavy": OUTPUT_POOLS}}
    return {"topic": "capacity", "settings": settings, "figures": capacity_figures(lines(0), [0])}


def test_a_mark_is_filled_and_the_rest_stays() -> None:
    text = "a\n<!-- one -->\nold\n<!-- end -->\nb\n<!-- two -->\nstays\n<!-- end -->\n"
    once = fill(text, {"one": "new \\1"})
    assert once == text.replace("old", "new \\1")
    assert fill(once, {"one": "new \\1"}) == once
    empty = text.replace("old\n", "")
    assert fill(empty, {"one": "new \\1"}) == once
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_a_text_without_any_mark_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("nothing here\n")
    with pytest.raises(FiguresError, match="has no mark among one"):
        fill_file(tmp_path / "a.md", {"one": "1"})
    with pytest.raises(FiguresError, match="have no tables"):
        fill_file(tmp_path / "a.md", {})
    (tmp_path / "open.md").write_text("<!-- one -->\nold\n")
    with pytest.raises(FiguresError, match="the mark one has no <!-- end -->"):
        fill_file(tmp_path / "open.md", {"one": "1"})
    with pytest.raises(FiguresError, match="No such file"):
        fill_file(tmp_path / "b.md", {"one": "1"})


def test_shared_prefixes_by_cell_and_by_degree() -> None:
    found = doc_tables(sharing_document("short"))
    assert set(found) == {"throughput", "held", "by degree"}
    row = "| 8, 512, 0.3, `random` | 1.50 | 3.00 | 6.00 | 4.50 | 4.50 "
    assert f"{row}| 1.50 [1.50, 1.50] | 0.75 [0.75, 0.75] (mask) |" in found["throughput"]
    assert "| 16 | 1.50 [1.50, 1.50] | 1, 1, 1 |" in found["by degree"]
    assert set(doc_tables(sharing_document("long"))) == {"long"}


def test_capacity_by_workload_and_pool() -> None:
    found = doc_tables(capacity_document())
    assert "| prompt-heavy, 4096 | 3 | 3 | 3 | 8 | 2.67 | " in found["frontier"]
    assert "| output-heavy, 3072 | 4; 0 | 4; 0 | 4; 0 | 9; 0 |" in found["retracting"]
    assert "| `random` | 1.60 |" in found["sla"]


def test_the_full_table_by_study_and_its_answers(tmp_path: Path) -> None:
    runs = [run_of(arm, 0, [record(0, 0)], 2.0) for arm in ("native", "skip", "auto")]
    document = eval_document([{**result_of(runs), "study": "talk", "setting": {}}], "command")
    found = doc_tables(document)
    assert found["table"].startswith("### `talk`\n\n| arm | repeats | tokens/s |")
    assert "**When does copy-on-write beat skip, and by how much?**\n\n- " in found["answers"]
    (tmp_path / "eval.json").write_text(json.dumps(document))
    (tmp_path / "a.md").write_text("<!-- table -->\n<!-- end -->\n")
    command = ["report", str(tmp_path / "eval.json"), "--doc", str(tmp_path / "a.md")]
    assert main(command) == 0
    assert found["table"] in (tmp_path / "a.md").read_text()
    assert not list(tmp_path.glob("*.html"))
    assert main([*command, "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("topic", ["cow", "capacity", "eval", "policies"])
def test_the_committed_texts_show_the_committed_figures(topic: str) -> None:
    path = DOCS / "results" / f"{topic}.json"
    if not path.exists():
        pytest.skip("no figures were measured yet")
    document = json.loads(path.read_text("utf-8"))
    parts = quality_tables.tables(document) if topic == "policies" else doc_tables(document)
    for name in TEXTS:
        text = name.read_text("utf-8")
        assert fill(text, parts) == text, name.name
