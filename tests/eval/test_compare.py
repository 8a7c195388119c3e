"""Ratios are taken inside a repeat; token identity is judged on equal prompts."""

from __future__ import annotations

import pytest
from vtoken_sglang_eval.compare import (
    check_tokens,
    compare_arms,
    first_difference,
    paired_ratios,
    same_evictions,
    summarize_arms,
)
from vtoken_sglang_eval.table import difference, number, result_table, warning_lines

from tests.eval.builders import record, result_of, run_of, three_arm_result


def test_ratios_pair_runs_of_the_same_repeat() -> None:
    # The machine is three times slower in repeat 1; inside a repeat the ratio is 0.8 and 0.5.
    runs = [
        run_of("native", 0, [record()], duration_s=1.0),
        run_of("hook-only", 0, [record()], duration_s=1.25),
        run_of("hook-only", 1, [record()], duration_s=6.0),
        run_of("native", 1, [record()], duration_s=3.0),
        run_of("native", 2, [record()], duration_s=1.0),
    ]
    ratios = paired_ratios(runs, "hook-only", "native", "request_throughput")
    assert ratios == pytest.approx([0.8, 0.5])


def test_hook_only_is_compared_with_native_and_never_with_stock() -> None:
    pairs = [(entry["arm"], entry["reference"]) for entry in three_arm_result()["comparisons"]]
    assert pairs == [("native", "stock"), ("hook-only", "native")]
    without_native = [run for run in three_arm_result()["runs"] if run["arm"] != "native"]
    assert compare_arms(without_native) == []


def test_summaries_are_medians_over_repeats() -> None:
    runs = [run_of("stock", repeat, [record()], duration_s=1.0 + repeat) for repeat in range(3)]
    figure = summarize_arms(runs)["stock"]["request_throughput"]
    assert figure["median"] == pytest.approx(1 / 2)
    assert (figure["min"], figure["max"]) == pytest.approx((1 / 3, 1.0))


def test_equal_tokens_are_reported_as_equal() -> None:
    entries = {entry["arm"]: entry for entry in three_arm_result()["tokens"]["arms"]}
    assert entries["hook-only"]["requests"] == 4
    assert entries["hook-only"]["different"] == entries["hook-only"]["mismatched"] == 0
    assert entries["hook-only"]["self_consistent"]


def test_only_answers_to_equal_prompts_count_as_mismatches() -> None:
    changed = (1, 2, 9, 4, 5)
    runs = [
        run_of("stock", 0, [record(0, 0), record(0, 1), record(1, 0)]),
        run_of(
            "native",
            0,
            [
                record(0, 0, output_ids=changed),
                record(0, 1, prompt_hash="another", output_ids=changed),
                record(1, 0),
            ],
        ),
    ]
    entry = check_tokens(runs, "stock")[1]
    assert (entry["requests"], entry["different"], entry["mismatched"]) == (3, 2, 1)
    assert entry["first"] == {"repeat": 0, "session": 0, "turn": 0, "index": 2}
    table = result_table(result_of(runs))
    assert "native: 1 of 3 answers differ from stock's to the same prompt, 2 in all." in table


def test_different_answers_are_told_with_what_was_evicted() -> None:
    naive = run_of("naive", 0, [record()])
    never = run_of("publish-never", 0, [record(output_ids=(1, 2, 9, 4, 5))])
    naive["summary"] |= {"evicted_tokens": 12, "early_evictions": 0}
    never["summary"] |= {"evicted_tokens": 9, "early_evictions": 2}
    entries = {entry["arm"]: entry for entry in check_tokens([naive, never], "naive")}
    assert entries["publish-never"]["evictions"] == {
        "evicted": 9, "reference_evicted": 12, "early_evictions": 2,
    }  # fmt: skip
    assert [entry["arm"] for entry in same_evictions(list(entries.values()))] == ["publish-never"]
    assert difference(entries["publish-never"], "naive") == (
        "1 of 1 answers differ from naive's to the same prompt, 1 in all. Other tokens were "
        "evicted: 9, naive 12. 2 looks came ahead of the interval, the pool being short."
    )
    del never["summary"]["early_evictions"]
    never["summary"]["evicted_tokens"] = 12
    entry = check_tokens([naive, never], "naive")[1]
    assert entry["evictions"] == {"evicted": 12, "reference_evicted": 12}
    assert difference(entry, "naive").endswith("1 in all.")


def test_repeats_of_one_arm_that_differ_are_reported() -> None:
    runs = [
        run_of("stock", 0, [record()]),
        run_of("stock", 1, [record(output_ids=(9, 9, 9, 9, 9))]),
    ]
    assert not check_tokens(runs, "stock")[0]["self_consistent"]
    assert "Its own repeats differ" in result_table(result_of(runs, repeats=2))


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_the_table_shows_medians_and_ratios() -> None:
    table = result_table(three_arm_result())
    assert "median of 2 repeats" in table
    assert "hook-only / native" in table
    assert "0.909 [0.909, 0.909]" in table
    assert "tokens: hook-only: all 4 answers equal stock's." in table


def test_warnings_name_what_makes_figures_doubtful() -> None:
    result = three_arm_result()
    assert warning_lines(result) == []
    result["runs_planned"] = 9
    result["runs"][1]["load_average_before"] = 3.25
    result["runs"][2]["summary"]["failed"] = 2
    failed, interrupted, busy = warning_lines(result)
    assert failed.startswith("2 requests failed")
    assert interrupted == "Interrupted: 6 of 9 runs were finished."
    assert "load average 3.2 on 2 cores" in busy
    assert result_table(result).count("WARNING: ") == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.5, "1234"),
        (123.4, "123"),
        (12.34, "12.3"),
        (1.234, "1.23"),
        (0.1234, "0.123"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text
