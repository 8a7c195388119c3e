"""The table against values worked out by hand, and what it comes to."""

from __future__ import annotations

import math

from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.table import long_table, paired, runs_table, summary, wide
from vtoken_sglang_eval.verdict import Ratio, best_of, ratio_of, sharing_of

from tests.eval.builders import study

# Seconds for the same ten tokens, so a ratio of throughputs is one of seconds turned over.
SPEED = {
    "native": (2.0, 4.0, 8.0),
    "snapkv 0.5 skip": (2.0, 2.0, 8.0),
    "snapkv 0.5 mask": (1.0, 2.0, 2.0),
    "snapkv 0.5 auto": (1.0, 1.0, 2.0),
}
QUALITY = {
    "native": 0.8, "snapkv 0.5 skip": 0.8, "snapkv 0.5 mask": 0.4, "snapkv 0.5 auto": 0.4
}  # fmt: skip


def test_ratios_are_taken_within_a_repeat() -> None:
    cells = summary(long_table(runs_table([study(SPEED)])))
    row = cells[(cells["arm"] == "snapkv 0.5 auto") & (cells["metric"] == "tokens_per_s")].iloc[0]
    assert (row["value"], row["low"], row["high"]) == (10.0, 5.0, 10.0)
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (4.0, 2.0, 4.0)
    assert row["repeats"] == 3
    native = cells[cells["native"].astype(bool)]
    assert set(native["ratio"].dropna()) == {1.0}


def test_a_cell_without_native_in_its_repeat_has_a_value_and_no_ratio() -> None:
    head, runs = study(SPEED)
    alone = [run for run in runs if run["arm"] != "native" or run["repeat"]]
    long = long_table(runs_table([(head, alone)]))
    first = long[(long["repeat"] == 0) & (long["metric"] == "tokens_per_s")]
    assert len(first) == 3
    assert first["ratio"].isna().all()


def test_loads_and_studies_stay_apart() -> None:
    slow = {arm: tuple(2 * s for s in seconds) for arm, seconds in SPEED.items()}
    studies = [study(SPEED, loads=(2, 8)), study(slow, name="other")]
    table = wide(summary(long_table(runs_table(studies))))
    assert len(table) == 4 * 2 + 4
    native = table[table["native"].astype(bool)].set_index(["study", "load"])["tokens_per_s"]
    assert native.to_dict() == {("chat", 2): 2.5, ("chat", 8): 2.5, ("other", 8): 1.25}


def test_arms_are_paired_directly() -> None:
    runs = runs_table([study(SPEED)])
    assert paired(runs, "tokens_per_s", "snapkv 0.5 auto", "snapkv 0.5 mask") == [1.0, 2.0, 1.0]
    found = {one.other: one for one in sharing_of(runs, "chat")}
    assert found["skip"].throughput == Ratio(2.0, 2.0, 4.0, 3)
    assert found["mask"].throughput == Ratio(1.0, 1.0, 2.0, 3)
    assert found["mask"].same_answers
    runs.loc[runs["arm"] == "snapkv 0.5 mask", "output_sha256"] = "another"
    assert [one.same_answers for one in sharing_of(runs, "chat")] == [True, False]


def test_a_metric_that_is_zero_for_native_has_no_ratio() -> None:
    head, runs = study(SPEED)
    for run in runs:
        run["retractions"] = int(run["arm"] != "native")
    cells = summary(long_table(runs_table([(head, runs)])))
    taken = cells[(cells["metric"] == "retractions") & (cells["arm"] == "snapkv 0.5 auto")].iloc[0]
    assert taken["value"] == 1
    assert math.isnan(taken["ratio"])


def test_the_best_cell_is_the_fastest_that_keeps_quality() -> None:
    def best(quality: dict[str, float] | None) -> tuple[str, bool | None]:
        found = best_of(summary(long_table(runs_table([study(SPEED, quality)]))), "chat")
        assert found is not None
        return found.arm, found.keeps_quality

    assert best(None) == ("snapkv 0.5 auto", None)
    assert best(QUALITY) == ("snapkv 0.5 skip", True)
    assert best({**QUALITY, "snapkv 0.5 skip": 0.1}) == ("snapkv 0.5 auto", False)
    assert best({**QUALITY, "snapkv 0.5 mask": 0.77}) == ("snapkv 0.5 mask", True)


def test_nothing_pruned_has_no_best_cell() -> None:
    options = Options(policies=(), ablations=("native", "hook-only"), model="tiny")
    measured = study({"native": (1.0,), "hook-only": (1.1,)}, options=options)
    assert best_of(summary(long_table(runs_table([measured]))), "chat") is None


def test_a_ratio_shows_its_range_over_several_repeats_only() -> None:
    assert str(ratio_of([1.0, 2.0, 1.5])) == "1.50 [1.00, 2.00]"
    assert str(ratio_of([1.234])) == "1.23"
    assert ratio_of([]) is None
