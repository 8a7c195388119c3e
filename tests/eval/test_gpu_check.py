"""`scripts/gpu_check.sh` without a GPU: it refuses to measure, and its checks can fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eval import provenance
from eval.bench import gpu_check, timing
from eval.bench.flashinfer_loader import NAMES, load_flashinfer
from eval.bench.gpu_check import Check, exit_status, report, run, saver
from eval.bench.kernel_checks import Case
from tests.helpers import flashinfer_stand_in as stand_in

ROOT = Path(__file__).resolve().parents[2]


def cpu_check(library: Any = stand_in) -> Check:
    return Check(device=torch.device("cpu"), seed=1, repeats=0, dry=True, library=library)


def failed(check: Check) -> set[str]:
    return {case.what for case in check.cases if not case.passed}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured_or_written(tmp_path: Path) -> None:
    out = tmp_path / "cuda.json"
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), "--out", str(out)],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no CUDA device here, so nothing was measured" in done.stdout
    assert not out.exists()


def test_the_dry_run_passes_in_the_interpreter(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.helpers.gpu_dry_run", "--dry-run"]
    out = tmp_path / "cuda.json"
    done = subprocess.run(
        [*command, "--out", str(out)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
    assert "nothing was measured" in done.stdout
    for part in ("copy_times", "pack_times", "attention_times", "served"):  # never a time
        assert f"not run: {part}" in done.stdout
    assert not out.exists()


def test_flashinfer_comparisons_pass_on_the_stand_in() -> None:
    check = cpu_check()
    gpu_check.flashinfer(check)
    assert failed(check) == set()
    assert check.figures["graph_commit_mismatches"]["value"] == 0
    what = " ".join(case.what for case in check.cases)
    for part in ("CUDA cores", "tensor cores", "ragged and paged", "paged only"):
        assert part in what
    assert {case.kernel for case in check.cases} == {"flashinfer", "commit"}


class WrongDecode(stand_in.BatchDecodeWithPagedKVCacheWrapper):
    def forward(self, q: torch.Tensor, paged_kv_cache: Any, **options: Any) -> torch.Tensor:
        return super().forward(q, paged_kv_cache, **options) * 1.01


def wrong_merge(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> Any:
    return (v_a + v_b) / 2, s_a


@pytest.mark.parametrize(
    ("name", "wrong", "seen"),
    [
        ("BatchDecodeWithPagedKVCacheWrapper", WrongDecode, "decode, tensor cores"),
        ("merge_state", wrong_merge, "extend, ragged and paged"),
    ],
)
def test_a_wrong_library_fails(name: str, wrong: Any, seen: str) -> None:
    names = {entry: getattr(stand_in, entry) for entry in stand_in.__all__}
    check = cpu_check(SimpleNamespace(**{**names, name: wrong}))
    gpu_check.flashinfer(check)
    assert any(what.startswith(seen) for what in failed(check))


class Forgetful(stand_in.BatchDecodeWithPagedKVCacheWrapper):
    """Its second replay differs, as if the commit had changed what is read."""

    def forward(self, q: torch.Tensor, paged_kv_cache: Any, **options: Any) -> torch.Tensor:
        out = super().forward(q, paged_kv_cache, **options)
        return out + 1e-7 * len(self.plans)


def test_a_commit_that_changes_bits_is_counted() -> None:
    names = {entry: getattr(stand_in, entry) for entry in stand_in.__all__}
    check = cpu_check(SimpleNamespace(**{**names, "BatchDecodeWithPagedKVCacheWrapper": Forgetful}))
    gpu_check.flashinfer(check)
    assert check.figures["graph_commit_mismatches"]["value"] > 0
    assert any(case.kernel == "commit" and not case.passed for case in check.cases)


def test_no_compilation_is_started_late() -> None:
    check = cpu_check()
    check.started -= gpu_check.LAST_START_S + 1
    with pytest.raises(gpu_check.NotHereError, match="no time left"):
        gpu_check.flashinfer_other_heads(check)


def test_not_a_number_does_not_pass() -> None:
    assert not Case(kernel="x", what="y", error=float("nan"), limit=1.0).passed
    assert not Case(kernel="x", what="y", error=2.0, limit=1.0).passed
    assert Case(kernel="x", what="y", error=1.0, limit=1.0).passed


def test_a_part_that_raises_fails_the_run_and_stops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(check: Check) -> None:
        raise RuntimeError("does not compile")

    def absent(check: Check) -> None:
        raise ImportError("sglang")

    def good(check: Check) -> None:
        check.figures["x"] = {"value": 1.5, "unit": "u", "spread": None}

    saved: list[list[str]] = []
    parts = ((broken, False, False), (absent, False, False), (good, False, False))
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    check = cpu_check(None)
    check.dry = False
    run(check, lambda check: saved.append(list(check.figures)))
    assert saved == [["x"]]
    assert check.missing == {"absent": "sglang"}
    text = report(check)
    assert "FAILED broken: raised RuntimeError: does not compile" in text
    assert "not run: absent: sglang" in text
    assert ["|", "x", "|", "1.5", "|", "u", "|"] in [line.split() for line in text.splitlines()]


def test_figures_are_written_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "cuda.json"
    cpu = provenance.machine("cpu")
    monkeypatch.setattr(
        provenance,
        "machine",
        lambda device: {**cpu, "accelerator": "a GPU", "accelerator_count": 1},
    )
    save = gpu_check.saver(out, "0123abc")
    check = cpu_check()
    for name in ("kernel_mismatches", "copy_ratio"):
        check.figures[name] = {"value": 0.5, "unit": "u", "spread": None}
        save(check)
        document = json.loads(out.read_text())
        assert document["topic"] == "cuda"
        assert name in document["figures"]
    assert set(document) == {
        *("topic", "command", "commit", "device", "versions", "settings", "repeats", "figures")
    }
    assert set(document["figures"]) == {"kernel_mismatches", "copy_ratio"}
    assert document["device"].startswith("1 x a GPU")
    assert document["commit"]


def test_parts_of_flashinfer_load() -> None:
    """A whole installation gives every name that the checks use."""
    pytest.importorskip("flashinfer")
    library = load_flashinfer()
    assert set(vars(library)) == set(NAMES)


class NanDecode(stand_in.BatchDecodeWithPagedKVCacheWrapper):
    def forward(self, q: torch.Tensor, paged_kv_cache: Any, **options: Any) -> torch.Tensor:
        return super().forward(q, paged_kv_cache, **options) * torch.nan


def test_nan_is_reported_and_is_no_figure() -> None:
    names = {entry: getattr(stand_in, entry) for entry in stand_in.__all__}
    check = cpu_check(SimpleNamespace(**{**names, "BatchDecodeWithPagedKVCacheWrapper": NanDecode}))
    check.figures["flashinfer_max_error"] = {"value": 0.1, "unit": "u", "spread": None}
    gpu_check.flashinfer(check)
    assert "flashinfer_max_error" not in check.figures
    check.dry = False
    check.figures["x"] = {"value": float("inf"), "unit": "u", "spread": None}
    assert "FAILED flashinfer: decode, tensor cores" in report(check)
    assert exit_status(check) == 1


def test_a_run_that_compared_nothing_does_not_pass() -> None:
    check = cpu_check(None)
    assert exit_status(check) == 1
    check.cases.append(Case(kernel="x", what="y", error=0.0))
    assert exit_status(check) == 0


def test_a_figures_file_that_refuses_stops_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier run of more repeats is not replaced; the later parts still run and are shown."""
    monkeypatch.setattr(
        provenance, "machine", lambda device: {"cores": 1, "cpu": "c", "memory_gib": 1}
    )
    ran: list[str] = []

    def part(check: Check) -> None:
        ran.append("part")
        check.cases.append(Case(kernel="x", what="y", error=0.0))
        check.figures["x"] = {"value": 1.0, "unit": "u", "spread": None}

    monkeypatch.setattr(gpu_check, "PARTS", ((part, False, False), (part, False, False)))
    save = saver(tmp_path / "cuda.json", "0123abc")
    more, fewer = cpu_check(None), cpu_check(None)
    more.repeats = 30
    run(more, save)
    run(fewer, save)
    assert ran == ["part"] * 4
    assert exit_status(more) == 0
    assert exit_status(fewer) == 1
    assert "smaller measurement" in report(fewer)


def test_servers_are_not_started_late_and_do_not_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    check = cpu_check(None)
    check.model = check.dataset = "there"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check.started -= gpu_check.LIMIT_S - gpu_check.MIN_SERVED_S + 1
    with pytest.raises(gpu_check.NotHereError, match="too few"):
        gpu_check.served(check)
    slept = [sys.executable, "-c", "import time; time.sleep(60)"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command: popen(slept))
    monkeypatch.setattr(gpu_check, "MIN_SERVED_S", 0)
    monkeypatch.setattr(gpu_check, "LIMIT_S", gpu_check.LIMIT_S - gpu_check.MIN_SERVED_S)
    check.started = time.monotonic() - gpu_check.LIMIT_S + 0.2
    gpu_check.served(check)
    (case,) = check.cases
    assert not case.passed
    assert "not done" in case.what


def test_the_device_is_busy_while_the_runs_are_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a head start, a short kernel's events span the time of its launch on the host."""
    calls: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            calls.append("event")

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("sleep"), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    assert timing.times_ms(lambda: calls.append("work"), 2) == [1.0, 1.0]
    runs = ["event", "work", "event"] * 2
    assert calls == [*["work"] * timing.WARM_UPS, "sleep", *runs, "wait"]
