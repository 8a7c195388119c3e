"""The page: verdict first, plots that work offline, every run as CSV; looked at in a browser."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from vtoken_sglang_eval.arms import groups_of
from vtoken_sglang_eval.errors import ConfigError
from vtoken_sglang_eval.main import verdicts
from vtoken_sglang_eval.options import Options
from vtoken_sglang_eval.report import pictures, render, write_report
from vtoken_sglang_eval.results import number

from tests.eval.builders import study
from tests.eval.test_table import QUALITY, SPEED

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


def page_of(*studies: object) -> str:
    return render(studies)[0]  # type: ignore[arg-type]


def body_of(page: str) -> str:
    """The text of the page without scripts and styles."""
    bare = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", bare)).split())


def test_the_verdict_comes_first_with_its_cost_in_answers() -> None:
    text = body_of(page_of(study(SPEED, QUALITY)))
    verdict = text.partition("multi_turn ")[2]
    assert verdict.startswith(
        "snapkv 0.5 skip serves 1.00 [1.00, 2.00] × native's tokens per second"
    )
    assert "80 % of the questions are answered right, 80 % with full attention" in verdict[:400]


def test_without_questions_the_page_says_so() -> None:
    assert "Answers were not checked" in body_of(page_of(study(SPEED)))


def test_no_arm_that_keeps_quality_is_said() -> None:
    poor = {arm: 0.8 if arm == "native" else 0.1 for arm in SPEED}
    assert "No pruned arm keeps 95 %" in body_of(page_of(study(SPEED, poor)))


def test_the_last_lines_say_gain_and_cost() -> None:
    lines = verdicts([study(SPEED, QUALITY)])
    assert lines[0].startswith("chat: snapkv 0.5 skip serves 1.00 [1.00, 2.00] x native's tokens/s")
    assert lines[-1].strip() == "answers: 80% right, 80% with full attention"


def test_the_page_needs_nothing_from_outside() -> None:
    page = page_of(study(SPEED, QUALITY))
    outside = re.findall(r"""(?:src|href)=["'](?!#)[^"']+""", page.partition("<script>")[0])
    assert outside == []
    assert "vegaEmbed" in page
    assert len(page) < 1_250_000


def test_every_run_is_in_the_csv_beside_the_page(tmp_path: Path) -> None:
    head, runs = study(SPEED, QUALITY)
    path = write_report([(head, runs)], tmp_path / "deep" / "report.html")
    rows = list(csv.DictReader(io.StringIO(path.with_name("runs.csv").read_text())))
    assert [row["arm"] for row in rows] == [run["arm"] for run in runs]
    assert float(rows[0]["tokens_per_s"]) == runs[0]["tokens_per_s"]


def test_text_from_data_cannot_break_out_of_the_page() -> None:
    head, runs = study(SPEED, name="</script><script>alert(1)//")
    head["command"] = "<img src=x onerror=alert(1)>"
    page = page_of((head, runs))
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page


def test_what_could_not_be_read_is_left_out_and_said() -> None:
    head, runs = study(SPEED)
    head["missing"] = ["memory: the server has no --enable-metrics"]
    for run in runs:
        for name in ("held_per_request", "peak_held_tokens"):
            del run[name]
        run["trace"]["pool"] = []
    text = body_of(page_of((head, runs)))
    assert "Left out, memory: the server has no --enable-metrics." in text
    assert "memory held" not in text.partition("CSV")[2].partition("Where it comes from")[0]
    assert "Memory held over time" not in text


def test_studies_without_pruned_arms_are_shown_too() -> None:
    options = Options(policies=(), ablations=("native", "hook-only"), model="tiny")
    other = study({"native": (1.0, 1.0), "hook-only": (1.1, 1.0)}, options=options, name="overhead")
    text = body_of(page_of(study(SPEED, QUALITY), other))
    assert "Nothing was pruned" in text
    assert "hook-only" in text


def test_of_many_arms_only_native_and_auto_are_drawn_at_first() -> None:
    options = Options(policies=("snapkv", "tova", "h2o"), model="tiny")
    names = [arm.name for group in groups_of(options) for arm in group.arms]
    page = page_of(study({name: (1.0,) for name in names}, options=options))
    assert len(re.findall(r'type="checkbox" value="[^"]+" checked', page)) == 1 + 3
    assert page.count('type="checkbox" value=') == 10


def test_plots_are_written_as_pictures(tmp_path: Path) -> None:
    paths = pictures([study(SPEED, QUALITY)], tmp_path)
    assert [path.name for path in paths] == [
        f"chat-{name}.svg"
        for name in ("quality_memory", "quality_throughput", "throughput_latency", "pool")
    ]
    assert all(path.read_text().startswith("<svg") for path in paths)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (float("nan"), "-"), (0.1234, "0.123"), (12.34, "12.3"), (45678.9, "45,679")],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(ConfigError, match=r"pip install 'vtoken-sglang\[eval\]'"):
        page_of(study(SPEED))


# --- in a browser -----------------------------------------------------------------------------

END = "</body>\n</html>"
PROBE = """
<script>
const later = ms => new Promise(done => setTimeout(done, ms));
const drawn = () => document.querySelectorAll(".study > .plots svg").length;
const marks = () => document.querySelectorAll(".study > .plots svg .mark-symbol path").length;
(async () => {
  for (let tries = 0; drawn() < 4 && tries < 100; tries++) await later(100);
  const views = [...document.querySelectorAll(".study > .plots .view")];
  const csv = await (await fetch(document.getElementById("csv").href)).text();
  const found = {drawn: drawn(), all: marks(), widths: views.map(view => view.clientWidth),
    wide: document.documentElement.scrollWidth, window: innerWidth, csv};
  document.querySelector('[data-all=""]').click();
  for (let tries = 0; marks() === found.all && tries < 50; tries++) await later(100);
  found.none = marks();
  document.querySelector("details.more").open = true;
  for (let tries = 0; drawn() < 5 && tries < 20; tries++) await later(100);
  found.more = document.querySelectorAll("details.more svg").length;
  document.body.dataset.found = JSON.stringify(found);
})();
</script>
"""


def in_browser(page: Path, *flags: str) -> str:
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=15000"]
    environment = {**os.environ, "DBUS_SESSION_BUS_ADDRESS": "disabled:"}
    done = subprocess.run(
        [*command, *flags, page.as_uri()], capture_output=True, text=True, timeout=180,
        env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize("width", [1400, 500])
def test_a_browser_draws_every_plot_and_arms_can_be_hidden(tmp_path: Path, width: int) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_of(study(SPEED, QUALITY)).replace(END, PROBE + END))
    dom = in_browser(page, f"--window-size={width},900", "--dump-dom")
    match = re.search(r'data-found="([^"]+)"', dom)
    assert match, "the page's script did not run to its end"
    found = json.loads(unescape(match[1]))
    assert found["drawn"] == 4
    assert min(found["widths"]) > 300
    assert found["wide"] <= found["window"]  # nothing sticks out sideways
    assert found["all"] > found["none"]
    assert found["more"] > 0
    rows = list(csv.DictReader(io.StringIO(found["csv"])))
    assert [row["arm"] for row in rows[::3]] == list(SPEED)


@pytest.mark.skipif(not BROWSER, reason="no Chromium here: apt-get install chromium")
def test_a_screenshot_is_not_blank(tmp_path: Path) -> None:
    page, picture = tmp_path / "report.html", tmp_path / "page.png"
    page.write_text(page_of(study(SPEED, QUALITY)))
    in_browser(page, "--window-size=1400,1200", f"--screenshot={picture}")
    from PIL import Image

    colours = Image.open(picture).convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 100
