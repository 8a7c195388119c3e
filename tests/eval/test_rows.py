"""Rows of the full table where a grid is cut off, and what the file says of every study."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.errors import FiguresError, ResultsError
from vtoken_sglang_eval.main import main
from vtoken_sglang_eval.report_inputs import read_inputs
from vtoken_sglang_eval.rows import eval_document, rows_of, write_eval
from vtoken_sglang_eval.sla import within_limit

from tests.eval.builders import record, result_of, run_of


def timed(arm: str, repeat: int, duration_s: float, p95: float) -> dict[str, Any]:
    run = run_of(arm, repeat, [record(0, 0), record(0, 1)], duration_s)
    run["summary"]["e2e"]["p95"] = p95
    return run


def level(concurrency: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    result = result_of(runs, repeats=3)
    result["config"]["concurrency"] = concurrency
    name = f"talk_concurrency-{concurrency}"
    return {**result, "study": name, "setting": {"concurrency": concurrency}}


def test_a_cut_off_repeat_counts_only_where_both_arms_have_it() -> None:
    # The machine is ten times slower in the last repeat, which only native finished.
    runs = [timed(arm, n, 2.0, 1.0) for n in range(2) for arm in ("native", "auto")]
    native, auto = rows_of([result_of([*runs, timed("native", 2, 20.0, 9.0)], repeats=3)])
    assert (native["repeats"], auto["repeats"], auto["repeats_planned"]) == (3, 2, 3)
    ratio = auto["ratios"]["native"]["output_tokens_per_s"]
    assert ratio == {"median": 1.0, "min": 1.0, "max": 1.0, "repeats": 2}
    assert auto["sla_tokens_per_s"]["repeats"] == 2


def test_throughput_within_the_limit_is_of_one_repeat_and_all_its_levels() -> None:
    # native is best at 2 in flight, in 1 s; auto keeps that at 4, but in repeat 1 at 2 only.
    low = level(2, [timed(arm, n, 2.0, 1.0) for n in range(3) for arm in ("native", "auto")])
    high = level(
        4,
        [
            timed("native", 0, 2.5, 2.0), timed("auto", 0, 1.0, 1.05),
            timed("native", 1, 2.5, 2.0), timed("auto", 1, 1.0, 1.06),
            timed("native", 2, 2.5, 2.0),  # cut off here
        ],
    )  # fmt: skip
    for found in within_limit([low, high]):
        assert found["native"] == {"median": 5.0, "min": 5.0, "max": 5.0, "repeats": 3}
        assert found["auto"] == {"median": 7.5, "min": 5.0, "max": 10.0, "repeats": 2}


def test_no_level_within_the_limit_is_zero_and_no_baseline_is_nothing() -> None:
    slow = [timed("native", 0, 2.0, 1.0), timed("auto", 0, 2.0, 1.2)]
    assert within_limit([level(2, slow)])[0]["auto"]["median"] == 0.0
    assert within_limit([level(2, slow[1:])]) == [{}]


def test_the_file_tells_every_setting_and_only_shared_ones_on_top() -> None:
    results = [level(n, [timed("native", 0, 2.0, 1.0)]) for n in (2, 4)]
    document = eval_document(results, "vtoken-sglang eval full")
    assert document["settings"]["keep"] == 0.3
    assert "concurrency" not in document["settings"]
    facts = document["studies"]["talk_concurrency-4"]
    assert facts["settings"]["concurrency"] == 4
    assert facts["settings"]["policy"] == "random"
    assert facts["workload"] == {"name": "multi_turn", "requests": 2}


def test_a_file_of_other_figures_is_never_replaced(tmp_path: Path) -> None:
    document = eval_document([level(2, [timed("native", 0, 2.0, 1.0)])], "command")
    path = tmp_path / "core.json"
    path.write_text('{"topic": "core", "figures": {}}')
    for force in (False, True):
        with pytest.raises(FiguresError, match="topic 'eval' into .*core.json of 'core'"):
            write_eval(path, document, force)
    with pytest.raises(FiguresError, match="is not a folder"):
        write_eval(tmp_path / "none" / "eval.json", document)
    before = path.read_text()
    command = ["full", "--dry-run", "--figures", str(path)]
    assert main(command) == 2  # before anything is measured
    assert path.read_text() == before


def test_a_row_that_lacks_something_is_named(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    path.write_text('{"topic": "eval", "figures": {}, "rows": [{"arm": "auto"}]}')
    with pytest.raises(ResultsError, match="row 0 has no study, repeats"):
        read_inputs([path])


@pytest.mark.parametrize("reference", ["auto", "cow", "publish-never"])
def test_arms_that_lose_or_win_against_copy_on_write_have_a_ratio(reference: str) -> None:
    runs = [timed(reference, 0, 2.0, 1.0), timed("p1-never", 0, 1.0, 1.0)]
    rows = {row["arm"]: row for row in rows_of([result_of(runs)])}
    assert rows["p1-never"]["ratios"][reference]["output_tokens_per_s"]["median"] == 2.0


def test_whether_arms_with_the_same_evictions_answered_alike_is_in_their_rows() -> None:
    runs = [timed(arm, 0, 2.0, 1.0) for arm in ("native", "naive", "skip", "auto")]
    rows = {row["arm"]: row for row in rows_of([result_of(runs)])}
    assert [arm for arm, row in rows.items() if "same_evictions" in row] == ["auto"]
    found = rows["auto"]["same_evictions"]
    assert (found["reference"], found["requests"], found["different"]) == ("naive", 2, 0)
