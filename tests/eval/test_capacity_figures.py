"""The capacity figures: what counts as held at once, within the latency, and admitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vtoken_sglang_eval.bench import capacity_figures
from vtoken_sglang_eval.bench.capacity_figures import (
    admitted_share,
    complete_repeats,
    figures_of,
    latency_frontier,
    main,
    memory_frontier,
    sla_throughput,
)
from vtoken_sglang_eval.bench.capacity_parts import all_parts
from vtoken_sglang_eval.bench.capacity_runs import SHAPES, load_of
from vtoken_sglang_eval.errors import FiguresError
from vtoken_sglang_eval.pool import PoolSample


def load(level: int, p95: float, *, peak: int = 3, throughput: float = 10.0, **more: Any) -> Any:
    record = {"tokens": 8, "ttft": 0.5, "per_token": p95, "retractions": more.get("retracted", 0)}
    samples = [PoolSample(at_s=0.1 * n, running=n, used=100.0 * n) for n in range(peak + 1)]
    pruned = {"pruned_rows": peak, "retained_pages": 5 * peak, "held_pages": peak}
    found = load_of(level, 8 * 40 / throughput, [record] * 40, samples, [pruned], {}, {}).as_dict()
    return {**found, **more}


def lines(repeat: int, auto_peak: int = 8) -> list[dict[str, Any]]:
    """A whole repeat: native holds 3 at once and serves 3 at a p95 of 1.0 s per token."""
    found = []
    for part in all_parts():
        peak = auto_peak if part.arm == "auto" else 3
        levels = [load(1, 0.5, throughput=10), load(3, 1.0, throughput=20)]
        if part.arm == "auto":
            levels += [load(6, 1.04, throughput=32), load(9, 1.2, throughput=48)]
        line: dict[str, Any] = {"part": part.name, "repeat": repeat, "levels": levels}
        if part.kind == "frontier":
            line |= {"burst": load(40, 1.0, peak=peak), "retracting": load(40, 1.0, peak=peak + 1)}
        else:
            line |= {"held_natively": 3}
        found.append(line)
    return found


def test_a_load_is_summed_up_from_what_was_seen() -> None:
    found = load(40, 0.25, peak=7)
    assert (found["running_peak"], found["used_peak"]) == (7, 700.0)
    assert found["held_each"] == 6 * 16
    assert found["throughput"] == pytest.approx(10.0)
    assert found["token_p95"] == 0.25
    idle = load_of(
        1, 1.0, [{"tokens": 2, "ttft": 0, "per_token": 0, "retractions": 0}], [], [], {}, {}
    )
    assert idle.held_each is None


def test_looks_at_a_few_pruned_requests_do_not_count() -> None:
    samples = [PoolSample(at_s=0.0, running=10)]
    few = {"pruned_rows": 2, "retained_pages": 90, "held_pages": 0}
    many = {"pruned_rows": 8, "retained_pages": 40, "held_pages": 0}
    record = {"tokens": 2, "ttft": 0, "per_token": 0, "retractions": 0}
    assert load_of(1, 1.0, [record], samples, [few, many], {}, {}).held_each == 80


def test_the_latency_frontier_ends_at_the_first_level_that_is_too_slow() -> None:
    assert latency_frontier({"levels": [load(1, 1.0), load(2, 1.05), load(4, 1.06)]}) == 2
    assert latency_frontier({"levels": [load(1, 1.0), load(2, 2.0), load(4, 1.0)]}) == 1
    assert latency_frontier({"levels": [load(1, 1.0), load(2, 1.0, retracted=1)]}) == 1


def test_sla_throughput_is_the_best_within_the_latency() -> None:
    line = {"levels": [load(1, 1.0, throughput=5), load(4, 1.04, throughput=9), load(8, 2.0)]}
    assert sla_throughput(line, 1.0) == pytest.approx(9)
    assert sla_throughput(line, 0.5) == 0.0


def test_a_burst_that_was_held_whole_tells_nothing() -> None:
    with pytest.raises(FiguresError, match="send more requests"):
        memory_frontier(load(40, 1.0, peak=40))
    with pytest.raises(FiguresError, match="never seen pruned"):
        admitted_share({**load(40, 1.0), "held_each": None}, 4096)


def test_the_named_figures_are_there() -> None:
    found = figures_of([*lines(0), *lines(1, auto_peak=10)], [0, 1])
    for workload in SHAPES:
        for pool in ("small", "large"):
            assert found[f"frontier_ratio_{workload}_{pool}"]["value"] == pytest.approx(3.0)
    assert found["frontier_ratio_prompt_heavy_small"]["spread"]["max"] == pytest.approx(10 / 3)
    assert found["skip_frontier_ratio_output_heavy_large"]["value"] == 1.0
    for policy in ("streaming_llm", "random"):
        assert found[f"sla_throughput_ratio_{policy}"]["value"] == pytest.approx(32 / 20)
    assert found["admitted_share"]["value"] == pytest.approx(9 * 96 / 8192)


def test_a_repeat_counts_when_every_part_is_there() -> None:
    assert complete_repeats([*lines(0), *lines(1)[:-1]]) == [0]
    assert len({part.name for part in all_parts()}) == len(all_parts())


def test_parts_that_are_there_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, out = tmp_path / "raw.jsonl", tmp_path / "capacity.json"
    whole = {line["part"]: line for line in lines(0)}
    measured: list[str] = []

    def pretend(part: Any, _model: str, repeat: int, _seed: int) -> dict[str, Any]:
        measured.append(part.name)
        return {**whole[part.name], "repeat": repeat}

    monkeypatch.setattr(capacity_figures, "measure", pretend)
    monkeypatch.setattr(capacity_figures.provenance, "model_facts", lambda model: {"name": "m"})
    command = ["--out", str(out), "--raw", str(raw), "--model", "m"]
    assert main([*command, "--max-parts", "3"]) == 0
    assert len(measured) == 3
    assert not out.exists()
    assert main([*command, "--parts", "sla"]) == 0
    assert len(measured) == 6
    assert main(command) == 0
    assert sorted(measured) == sorted(whole)
    document = json.loads(out.read_text())
    assert document["topic"] == "capacity"
    assert document["figures"]["frontier_ratio_prompt_heavy_small"]["value"] == pytest.approx(
        8 / 3, abs=0.01
    )
    assert "no repeat is complete" in capsys.readouterr().out


def test_a_line_that_was_cut_off_is_named(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text(json.dumps(lines(0)[0]) + '\n{"part": "fron')
    words = ["--out", str(tmp_path / "out.json"), "--raw", str(raw), "--list", "--model", "m"]
    with pytest.raises(FiguresError, match=r"raw.jsonl: line 2 is cut off; delete it"):
        main(words)
