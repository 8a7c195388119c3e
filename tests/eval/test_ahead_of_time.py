"""The Triton kernels compile for Ampere, Hopper and Blackwell without a GPU, and do not spill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton.backends.nvidia")
ARCHITECTURES = (80, 90, 100)
WIDEST_THREAD_REGISTERS = 255


def compile_in_fresh_process(**extra: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "vtoken_sglang_eval.bench.ahead_of_time", "--json"]
    return subprocess.run(
        command, env={**environment, **extra}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    done = compile_in_fresh_process()
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(reports: list[dict[str, Any]], architecture: int) -> None:
    labels = {entry["label"] for entry in reports if entry["architecture"] == architecture}
    for kernel in ("copy_slots", "count_live", "pack_live", "attention_mass"):
        assert any(label.startswith(kernel) for label in labels), kernel
    keys = ["*fp16", "*bf16", "*fp32", "*fp8e5", *(["*fp8e4nv"] if architecture >= 89 else [])]
    for key in keys:
        assert any(f"k={key} " in label for label in labels), key


def test_nothing_spills(reports: list[dict[str, Any]]) -> None:
    assert [entry for entry in reports if entry["spill_bytes"]] == []


def test_registers_and_shared_memory_are_reported(reports: list[dict[str, Any]]) -> None:
    for entry in reports:
        assert 0 < entry["registers"] <= WIDEST_THREAD_REGISTERS, entry
        assert 0 <= entry["shared_bytes"] <= 48 * 1024, entry


def test_copies_move_sixteen_bytes_at_a_time(reports: list[dict[str, Any]]) -> None:
    copies = [entry for entry in reports if entry["label"].startswith("copy_slots")]
    assert {(entry["load_bits"], entry["store_bits"]) for entry in copies} == {(128, 128)}
    masses = [entry for entry in reports if entry["label"].startswith("attention_mass")]
    assert {entry["load_bits"] for entry in masses} == {128}


def test_an_interpreting_process_is_refused() -> None:
    done = compile_in_fresh_process(TRITON_INTERPRET="1")
    assert done.returncode != 0
    assert "without TRITON_INTERPRET" in done.stderr
