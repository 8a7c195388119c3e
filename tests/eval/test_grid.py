"""Grids: axes multiply, studies have names of their own, cells are saved once and found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval import full_command, run
from vtoken_sglang_eval.arms import ARMS
from vtoken_sglang_eval.cells import CellStore
from vtoken_sglang_eval.config import EvalConfig
from vtoken_sglang_eval.errors import ConfigError, FiguresError, ResultsError
from vtoken_sglang_eval.full import Cell, by_server, server_command
from vtoken_sglang_eval.grid import make_grid, read_grid, shipped_grids
from vtoken_sglang_eval.main import main
from vtoken_sglang_eval.rows import eval_document, rows_of, write_eval
from vtoken_sglang_eval.samples_mode import FILES, SAMPLES, with_samples
from vtoken_sglang_eval.sources import load_source
from vtoken_sglang_eval.workload import build_workload, workload_builders

from tests.eval.builders import CharacterTokenizer, record, result_of, run_of
from vtoken_sglang.option_flags import split_arguments
from vtoken_sglang.options import RequestOptions

BASE = {"model": "tiny", "device": "cpu", "dtype": "float32", "repeats": 2}


def test_lists_are_axes_and_lists_of_names_are_not() -> None:
    studies = make_grid(
        BASE,
        [
            {"workload": "multi_turn", "sharing": [1, 8], "keep": [0.3, 0.5], "arms": ["native"]},
            {"workload": "agent"},
        ],
        {"seed": 5},
    )
    assert [study.name for study in studies] == [
        "multi_turn_keep-0.3_sharing-1", "multi_turn_keep-0.5_sharing-1",
        "multi_turn_keep-0.3_sharing-8", "multi_turn_keep-0.5_sharing-8", "agent",
    ]  # fmt: skip
    assert studies[1].setting == {"sharing": 1, "keep": 0.5}
    assert {study.config.seed for study in studies} == {5}
    assert studies[0].config.arms == ("native",)
    assert studies[4].setting == {}


@pytest.mark.parametrize(
    ("tables", "match"),
    [
        ([{"workload": "agent"}, {"workload": "agent"}], "no two studies of a grid may be equal"),
        ([{"nonsense": 1}], "keys must be among .* got 'nonsense'"),
        ([{"keep": [0.3, 2]}], "keep: must be a number above 0 and at most 1, got 2"),
        ([{"keep": []}], "keep must have at least one value"),
        ([{"arms": "native"}], "arms: must be a list of texts, got 'native'"),
        (["agent"], "must hold tables of settings"),
    ],
)
def test_wrong_grids_are_refused(tables: list[dict[str, Any]], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make_grid(BASE, tables, {})


def test_shipped_grids_hold_known_arms_and_workloads() -> None:
    assert "full" in shipped_grids()
    for name in shipped_grids():
        studies = read_grid(name, {"model": "tiny"})
        assert all(study.arms for study in studies)
    with pytest.raises(ConfigError, match=r"at least one \[\[grid\]\] table"):
        read_grid("serve", {"model": "tiny"})


def words(arm: str, **changes: Any) -> list[str]:
    config = EvalConfig(model="tiny", device="cpu", dtype="float32", **changes)
    return server_command(config, ARMS[arm], 0)


def test_arms_that_differ_per_request_share_a_server() -> None:
    assert words("skip") == words("auto") == words("mask") == words("publish-never")
    assert words("auto", keep=0.9, interval=64) == words("auto")
    different = [words(arm) for arm in ("stock", "native", "naive", "p1", "auto", "reclaim-sync")]
    different += [words("auto", policy="streaming_llm"), words("auto", page_size=64, pool=4096)]
    assert len({tuple(command) for command in different}) == len(different)
    p1 = words("p1")
    assert p1[p1.index("--page-size") + 1] == "1"


class Ready:
    """What the order of cells needs to know of a prepared study."""

    def __init__(self, config: EvalConfig, arms: tuple[Any, ...]) -> None:
        self.config, self.arms = config, arms


def cells_of(repeats: int) -> list[Cell]:
    studies = make_grid(
        {**BASE, "arms": ["native", "skip", "auto"]}, [{"workload": "agent"}, {}], {}
    )
    return [
        Cell(study=study, prepared=Ready(study.config, study.arms), arm=arm, repeat=repeat)  # type: ignore[arg-type]
        for repeat in range(repeats)
        for study in studies
        for arm in study.arms
    ]


def test_a_server_serves_all_its_cells_of_a_repeat_in_rotating_order() -> None:
    groups = by_server(cells_of(2))
    shown = [[(cell.repeat, cell.study.name, cell.arm.name) for cell in group] for group in groups]
    assert shown == [
        [(0, "agent", "native"), (0, "multi_turn", "native")],
        [(0, "agent", "skip"), (0, "agent", "auto"),
         (0, "multi_turn", "skip"), (0, "multi_turn", "auto")],
        [(1, "agent", "auto"), (1, "agent", "skip"),
         (1, "multi_turn", "auto"), (1, "multi_turn", "skip")],
        [(1, "agent", "native"), (1, "multi_turn", "native")],
    ]  # fmt: skip


def stored(folder: Path, arms: tuple[str, ...] = ("native", "auto")) -> CellStore:
    """A store with one study and one finished cell per arm."""
    store = CellStore(folder)
    runs = [run_of(arm, 0, [record(0, 0), record(0, 1)]) for arm in arms]
    outline = {key: value for key, value in result_of(runs).items() if key != "runs"}
    store.open([{"name": "talk", "setting": {"sharing": 8}, "outline": outline}])
    for number, saved in enumerate(runs):
        origin = {"commit": "abc", "command": "x", "started": "now"}
        store.write("talk", {**saved, "at": f"2026-01-01T00:0{number}", "origin": origin})
    return store


def test_finished_cells_are_found_again_and_never_overwritten(tmp_path: Path) -> None:
    store = stored(tmp_path / "grid")
    assert store.has("talk", "auto", 0)
    assert not store.has("talk", "auto", 1)
    (result,) = store.results()
    assert [run["arm"] for run in result["runs"]] == ["native", "auto"]
    assert result["study"] == "talk"
    with pytest.raises(ResultsError, match="not overwritten"):
        stored(tmp_path / "grid")


def test_a_folder_belongs_to_one_grid(tmp_path: Path) -> None:
    store = stored(tmp_path / "grid")
    studies = store.manifest()["studies"]
    studies[0]["outline"]["commit"] = "another commit may go on"
    store.open(studies)
    studies[0]["outline"]["workload"]["fingerprint"] = "other requests"
    with pytest.raises(ResultsError, match="holds another grid"):
        store.open(studies)
    (tmp_path / "grid" / "grid.json").write_text("{}")
    with pytest.raises(ResultsError, match="format must be"):
        store.results()


def test_how_a_server_is_reached_and_waited_for_may_change(tmp_path: Path) -> None:
    store = stored(tmp_path / "grid")
    studies = store.manifest()["studies"]
    studies[0]["outline"]["config"] |= {"port": 31000, "startup_timeout": 900.0}
    assert store.check(studies)
    studies[0]["outline"]["config"]["keep"] = 0.9
    with pytest.raises(ResultsError, match="holds another grid"):
        store.check(studies)


@pytest.mark.parametrize("text", ["", '{"arm": "auto"', "[]", '{"arm": "auto", "repeat": 0}'])
def test_a_damaged_cell_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    store = stored(tmp_path / "grid")
    store.path("talk", "auto", 0).write_text(text)
    with pytest.raises(ResultsError, match=r"auto-1\.json: not readable as a cell .* delete it"):
        store.results()


def test_rows_hold_figures_ratios_and_throughput_within_the_limit(tmp_path: Path) -> None:
    (result,) = stored(tmp_path / "grid", ("native", "naive", "auto")).results()
    native, naive, auto = rows_of([result])
    assert auto["setting"] == {"sharing": 8}
    assert auto["figures"]["output_tokens_per_s"] == {"median": 5.0, "min": 5.0, "max": 5.0}
    assert auto["ratios"]["naive"]["output_tokens_per_s"]["median"] == 1.0
    assert set(auto["ratios"]) == {"native", "naive"}
    assert auto["sla_tokens_per_s"]["median"] == native["sla_tokens_per_s"]["median"] == 5.0


def test_the_figures_file_is_not_replaced_by_less(tmp_path: Path) -> None:
    target = tmp_path / "eval.json"
    results = stored(tmp_path / "grid").results()
    document = eval_document(results, "vtoken-sglang eval full")
    write_eval(target, document)
    assert json.loads(target.read_text())["figures"]["auto_vs_native_throughput_talk"]["value"] == 1
    fewer = {**document, "rows": document["rows"][:1]}
    with pytest.raises(FiguresError, match="would lose rows or repeats .talk auto"):
        write_eval(target, fewer)
    shorter = {**document, "rows": [{**row, "requests": 1} for row in document["rows"]]}
    with pytest.raises(FiguresError, match="would lose rows or repeats .talk native, talk auto"):
        write_eval(target, shorter)
    write_eval(target, fewer, force=True)
    assert len(json.loads(target.read_text())["rows"]) == 1


def test_failed_requests_make_no_figures(tmp_path: Path) -> None:
    results = stored(tmp_path / "grid").results()
    results[0]["runs"][0]["summary"]["failed"] = 1
    with pytest.raises(FiguresError, match="some requests failed .talk native.; delete these"):
        eval_document(results, "x")


def test_the_paper_grid_is_checked_on_samples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ModelTokenizer", lambda _model: CharacterTokenizer())
    monkeypatch.setattr(full_command, "ensure_smollm2", lambda: "small")
    words = ["full", "--config", "paper", "--model", "meta-llama/Llama-3.1-8B-Instruct"]
    assert main([*words, "--dry-run", "--samples", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    for workload in workload_builders():
        assert (workload in shown) is (workload != "mooncake")
    assert "--model-path meta-llama/Llama-3.1-8B-Instruct" in shown
    assert "server of hook-only" in shown
    assert "the requests come on top" in shown
    assert "dataset-data-hotpotqa.jsonl" in shown
    assert main([*words, "--samples"]) == 2
    assert "needs --dry-run" in capsys.readouterr().err


def test_every_sample_is_read_by_its_workload() -> None:
    for workload in workload_builders():
        (study,) = make_grid({**BASE, "workload": workload}, [{}], {})
        config = with_samples(study).config
        built = build_workload(config, load_source(config), CharacterTokenizer())
        assert built.requests
    assert {path.name for path in SAMPLES.iterdir()} == set(FILES.values())


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if arm.prunes])
@pytest.mark.parametrize("policy", ["random", "streaming_llm", "snapkv", "h2o"])
def test_a_server_takes_the_flags_and_options_of_its_arms(name: str, policy: str) -> None:
    config = EvalConfig(model="tiny", device="cpu", dtype="float32", policy=policy, keep=0.45)
    settings, rest = split_arguments(words(name, policy=policy)[3:])
    assert settings is not None
    assert not [word for word in rest if "vtoken" in word]
    options = RequestOptions.resolve(settings, ARMS[name].options(config), page_size=16)
    assert (options.policy, options.keep) == (policy, 0.45)
    assert (options.shared, options.publish) == (ARMS[name].shared, ARMS[name].publish)
