"""The report: one page, everything in it, nothing outside it, nothing overwritten."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval import plots
from vtoken_sglang_eval.errors import ResultsError
from vtoken_sglang_eval.plots import MAX_STEPS, latency_cdf
from vtoken_sglang_eval.report import render, write_report
from vtoken_sglang_eval.report_plots import figures_plots, shared_repeats, table_plots
from vtoken_sglang_eval.rows import eval_document, rows_of

from tests.eval.builders import record, result_of, run_of, three_arm_result

VOID = {"meta", "br", "img", "link", "hr", "path", "rect", "use", "circle", "line"}


class Page(HTMLParser):
    """Collects tags and text, and checks that HTML elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(html: str) -> Page:
    page = Page()
    page.feed(html)
    assert page.open == []
    return page


@pytest.fixture(scope="module")
def html() -> str:
    """The page of one three-arm result; plots take a while."""
    return render([three_arm_result()])


def test_the_page_holds_arms_ratios_plots_and_provenance(html: str) -> None:
    page = page_of(html)
    text = " ".join(" ".join(page.text).split())
    for expected in (
        "hook-only / native",
        "0.909",
        "all 4 answers equal stock's",
        "vtoken-sglang eval run --repeats 1",
        "0123456789ab (with local changes)",
        "2 cores of A CPU",
        "about native",
        "0.5.23",
    ):
        assert expected in text
    # two ratio plots, one per repeat, three latencies, one pool per arm
    assert page.tags.count("svg") == 2 + 1 + 3 + 3


def test_the_page_is_self_contained(html: str) -> None:
    page = page_of(html)
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in html
    assert "url(http" not in html


def test_text_from_a_result_is_escaped() -> None:
    result = result_of([run_of("stock", 0, [record()])])
    result["model"]["name"] = "<b>tiny</b> & co"
    assert "&lt;b&gt;tiny&lt;/b&gt; &amp; co" in render([result])


def test_several_results_make_several_sections() -> None:
    results = [result_of([run_of(arm, 0, [record()])]) for arm in ("stock", "native")]
    page = page_of(render(results))
    assert page.tags.count("section") == 2


def test_one_arm_alone_has_no_ratios() -> None:
    page = page_of(render([result_of([run_of("stock", 0, [record()])])]))
    assert "Ratios" not in page.text


def test_failed_requests_are_shown_on_top() -> None:
    runs = [run_of("stock", 0, [record(), record(0, 1, error="HTTP 500", output_ids=())])]
    assert "1 requests failed" in render([result_of(runs)])


def test_a_run_in_which_every_request_failed_still_renders() -> None:
    failed = record(error="HTTP 500", output_ids=(), gaps_s=())
    runs = [run_of("stock", 0, [failed]), run_of("native", 0, [failed])]
    assert "2 requests failed" in render([result_of(runs)])


def test_a_report_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    result = result_of([run_of("stock", 0, [record()])])
    write_report([result], path)
    with pytest.raises(ResultsError, match="not overwritten"):
        write_report([result], path)
    with pytest.raises(ResultsError, match="at least one result"):
        write_report([], tmp_path / "other.html")


def test_figures_files_are_shown_with_the_frontier_of_capacity() -> None:
    names = ("native_frontier_prompt_heavy_small", "auto_frontier_prompt_heavy_small")
    figures = {name: {"value": 3, "unit": "requests", "spread": None} for name in names}
    figures["frontier_ratio_prompt_heavy_small"] = {
        "value": 2.5, "unit": "auto / native", "spread": {"min": 2.0, "max": 3.0}
    }  # fmt: skip
    capacity = {"topic": "capacity", "command": "python -m x", "device": "CPU", "figures": figures}
    page = page_of(render([], [capacity, {**capacity, "topic": "core"}]))
    text = " ".join(page.text)
    assert "Figures: capacity" in text
    assert "Figures: core" in text
    assert "2.50" in text
    assert page.tags.count("svg") == 2  # frontier and ratios, of topic capacity only


def test_a_plot_of_the_frontier_holds_requests_and_no_ratios() -> None:
    entry = {"value": 3, "unit": "requests", "spread": {"min": 2, "max": 4}}
    names = (
        "native_frontier_prompt_heavy_small", "skip_frontier_prompt_heavy_small",
        "skip_frontier_retracting_prompt_heavy_small", "skip_frontier_ratio_prompt_heavy_small",
        "frontier_ratio_prompt_heavy_small", "skip_latency_frontier_prompt_heavy_small",
        "sla_throughput_ratio_random", "admitted_share",
    )  # fmt: skip
    plots = figures_plots({"topic": "capacity", "figures": dict.fromkeys(names, entry)})
    bars = {
        plot.name: [text.get_text() for text in plot.figure.axes[0].get_yticklabels()]
        for plot in plots
    }
    case = "prompt heavy small"
    assert bars == {
        "capacity-frontier": [f"{case}: native", f"{case}: skip"],
        "capacity-latency-frontier": [f"{case}: skip"],
        "capacity-ratios": [f"{case}: skip", f"{case}: auto"],
        "capacity-sla": ["random: auto"],
    }


def grid_result() -> dict[str, Any]:
    """A study of a grid, cut off in its second repeat, gone on with on another machine."""
    runs = [run_of("native", 0, [record()]), run_of("auto", 0, [record()])]
    runs.append(run_of("native", 1, [record()]))
    for number, run in enumerate(runs):
        origin = {"machine": {"cpu": f"CPU {number // 2}"}, "versions": {}, "patch_series": "1"}
        run |= {"at": f"2026-01-01T00:0{number}", "origin": origin}
    result = result_of(runs, repeats=2)
    return {**result, "runs_planned": 4, "study": "talk", "commits": ["abc", "def-dirty"]}


def test_a_cut_off_grid_says_what_it_is_short_of() -> None:
    text = " ".join(" ".join(page_of(render([grid_result()])).text).split())
    assert "1 of 2 for every arm" in text
    assert "Interrupted: 3 of 4 runs were finished." in text
    assert "Fewer repeats than planned: talk 1 of 2 (auto)." in text
    assert "Cells differ in their machine: see their files." in text
    assert "2026-01-01T00:00 to 2026-01-01T00:02" in text
    assert "abc, def-dirty (with local changes)" in text
    assert "give docs/results/capacity.json" in text
    assert "Whole request. Repeats that every arm has." in text
    kept, all_of_them = shared_repeats(grid_result()["runs"])
    assert [(run["arm"], run["repeat"]) for run in kept] == [("native", 0), ("auto", 0)]
    assert not all_of_them


def test_a_table_of_a_figures_file_is_shown_like_that_of_cells() -> None:
    document = eval_document([grid_result()], "vtoken-sglang eval full")
    text = " ".join(" ".join(page_of(render([], [document])).text).split())
    assert "All studies" in text
    assert "Fewer repeats than planned: talk 1 of 2 (auto)." in text


def test_a_table_of_several_studies_has_plots_of_all_of_them() -> None:
    runs = [run_of(arm, 0, [record()]) for arm in ("naive", "skip", "auto")]
    for run, held in zip(runs, (400.0, 300.0, 200.0), strict=True):
        run["summary"] |= {"used_tokens_per_request": held}
    rows = [
        row
        for study in ("talk", "more_talk")
        for row in rows_of([{**result_of(runs), "study": study}])
    ]
    throughput, held = table_plots(rows)
    axes = held.figure.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["more_talk", "talk"]
    dots = [
        line.get_xdata()[0]
        for line in axes.lines
        if line.get_marker() == "o" and len(line.get_xdata())
    ]
    assert sorted(dots) == [0.5, 0.5, 0.75, 0.75]
    assert throughput.name == "studies-throughput"
    assert table_plots(rows[:3]) == []
    document = {"topic": "eval", "command": "", "device": "", "figures": {}, "rows": rows}
    assert page_of(render([], [document])).tags.count("svg") == 2


def test_a_distribution_of_many_samples_keeps_its_ends_and_shape() -> None:
    gaps = tuple(0.001 * (step + 1) for step in range(5000))
    figure = latency_cdf(
        [run_of("auto", 0, [record(gaps_s=gaps)])], lambda request: request["gaps_s"], "ms"
    )
    (line,) = figure.axes[0].lines
    x, y = line.get_xdata(), line.get_ydata()
    assert len(x) == MAX_STEPS
    assert (x[0], y[0]) == pytest.approx((1.0, 1 / 5000))
    assert (x[-1], y[-1]) == pytest.approx((5000.0, 1.0))
    assert y == pytest.approx(x / 5000)
    few = latency_cdf([run_of("auto", 0, [record()])], lambda request: [0.1, 0.3], "ms")
    assert list(few.axes[0].lines[0].get_ydata()) == [0.5, 1.0]


def test_paths_are_written_to_a_tenth_of_a_point(html: str) -> None:
    drawn = re.findall(r' d="([^"]*)"', html)
    assert len(drawn) > 20
    assert not [path for path in drawn if re.search(r"\.\d{2}", path)]


@pytest.mark.parametrize(
    ("path", "short"),
    [
        (
            "M 0 1.25 \nL 2.55 1.21 \nL 2.58 3 \nL 2.51 3.04 \nL 7 -8.19 \nz\n",
            "M0 1.2H2.5V3V3.0L7 -8.1z",
        ),
        ("M 1 2 \nL 1 2 \nL 1 2 \nL 4 2", "M1 2H4"),
        ("M 0 2.24 \nC 0.58 2.25 1 -0 2 2", "M 0 2.2 \nC 0.5 2.2 1 -0 2 2"),
    ],
)
def test_a_path_names_each_place_once_and_steps_as_such(path: str, short: str) -> None:
    assert plots._shortened(path) == short


def test_an_arm_that_returns_memory_is_named_with_how_much() -> None:
    native, naive, auto = (
        run_of(arm, 0, [record(0, 0), record(0, 1)]) for arm in ("native", "naive", "auto")
    )
    naive["summary"] |= {"used_tokens_per_request": 400.0, "freed_pages": 0, "evicted_tokens": 9}
    auto["summary"] |= {"used_tokens_per_request": 300.0, "freed_pages": 21, "evicted_tokens": 9}
    page = page_of(render([result_of([native, naive, auto])]))
    text = " ".join(" ".join(page.text).split())
    assert "auto gave 21 pages of 16 back while requests ran" in text
    assert "25 % less than with naive" in text
    assert "auto: all 2 answers equal naive's" in text
    # ratios of naive and auto, memory (held, throughput), repeats, latencies, pools
    assert page.tags.count("svg") == 2 + 2 + 1 + 3 + 3
