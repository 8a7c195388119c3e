"""The parts of a measurement of capacity: arms, workloads and pools, and what each is asked."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtoken_sglang_eval.bench.capacity_runs import PAGE_SIZE, SHAPES, CapacityClient, Shape
from vtoken_sglang_eval.server import HOST, ServerProcess, free_port

KEEP = 0.3
CHUNK = 256
SLACK = 1.05
POOLS = {"small": 4096, "large": 8192}
# Output-heavy requests are a third as long: these pools hold about as many of them.
OUTPUT_POOLS = {"small": 1536, "large": 3072}
POLICIES = ("streaming_llm", "random")
SLA_SHAPE, SLA_POOL = "prompt_heavy", "large"
MAX_LEVEL = 8
MIN_REQUESTS = 3
ARMS: dict[str, tuple[str, ...]] = {
    "native": ("--vtoken-policy", "none", "--vtoken-ablation", "native"),
    "naive": ("--vtoken-ablation", "naive"),
    "skip": ("--vtoken-shared", "skip"),
    "auto": ("--vtoken-shared", "auto"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One server and what it is asked. `kind`: "frontier" (bursts, latency frontier) or "sla"
    (levels around what native holds)."""

    kind: str
    arm: str
    policy: str
    shape: Shape
    pool_name: str

    @property
    def pool(self) -> int:
        pools = POOLS if self.shape.name == "prompt_heavy" else OUTPUT_POOLS
        return pools[self.pool_name]

    @property
    def name(self) -> str:
        arm = self.arm if self.arm == "native" else f"{self.arm}_{self.policy}"
        return f"{self.kind}_{arm}_{self.shape.name}_{self.pool_name}"

    def command(self, model: str, port: int) -> list[str]:
        command = [sys.executable, "-m", "vtoken_sglang.cli", "serve", "--model-path", model]
        command += ["--host", HOST, "--port", str(port), "--device", "cpu", "--dtype", "float32"]
        command += ["--sleep-on-idle", "--enable-metrics", "--decode-log-interval", "1"]
        command += ["--page-size", str(PAGE_SIZE), "--max-total-tokens", str(self.pool)]
        command += ["--chunked-prefill-size", str(CHUNK), "--max-running-requests", "64"]
        command += ["--mem-fraction-static", "0.3"]
        if self.arm != "native":
            command += ["--vtoken-policy", self.policy, "--vtoken-keep", str(KEEP)]
        return [*command, *ARMS[self.arm]]


def all_parts() -> list[Part]:
    """In the order they are measured: the arms of one comparison after each other."""
    parts = [
        Part(kind="frontier", arm=arm, policy=POLICIES[0], shape=shape, pool_name=pool)
        for pool in POOLS
        for shape in SHAPES.values()
        for arm in ARMS
    ]
    compared = [("native", POLICIES[0]), *(("auto", policy) for policy in POLICIES)]
    parts += [
        Part(kind="sla", arm=arm, policy=policy, shape=SHAPES[SLA_SHAPE], pool_name=SLA_POOL)
        for arm, policy in compared
    ]
    return parts


def measure(part: Part, model: str, repeat: int, seed: int) -> dict[str, Any]:
    """Serve one part and return its line of the raw file."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(
            part.command(model, port), port, Path(folder) / "server.log", {"OMP_NUM_THREADS": "1"}
        ) as server,
    ):
        client = CapacityClient(server.base_url)
        key = f"{seed + repeat}"
        client.level(part.shape.prompts(1, f"{key} warm-up"), 4, 1)
        asked = frontier_loads if part.kind == "frontier" else sla_loads
        loads = asked(part, client, key)
    return {"part": part.name, "repeat": repeat, **loads}


def frontier_loads(part: Part, client: CapacityClient, key: str) -> dict[str, Any]:
    shape = part.shape
    count = shape.burst if part.pool_name == "large" else shape.burst // 2
    prompts = shape.prompts(count, f"{key} burst")
    loads = {
        "burst": client.burst(prompts, shape.answer, exact=True).as_dict(),
        "retracting": client.burst(prompts, shape.answer, exact=False).as_dict(),
    }
    levels: list[dict[str, Any]] = []
    level = 1
    while level <= MAX_LEVEL:
        prompts = shape.prompts(max(MIN_REQUESTS, 2 * (level - 1)), f"{key} level {level}")
        levels.append(client.level(prompts, shape.answer, level).as_dict())
        if not within(levels[-1], levels[0]["token_p95"]):
            break
        level *= 2
    return {**loads, "levels": levels}


def sla_loads(part: Part, client: CapacityClient, key: str) -> dict[str, Any]:
    """Levels at parts and multiples of what native holds at once."""
    held = part.shape.held_natively(part.pool)
    levels = sorted({1, max(1, held // 2), held, 2 * held, 3 * held})
    found = []
    for level in levels:
        prompts = part.shape.prompts(max(4, level + level // 2), f"{key} level {level}")
        found.append(client.level(prompts, part.shape.answer, level).as_dict())
    return {"held_natively": held, "levels": found}


def within(load: dict[str, Any], baseline: float) -> bool:
    return not load["retracted"] and load["token_p95"] <= SLACK * baseline
