"""What the hooks cost when nothing is evicted, with both servers up and taking turns.

    python -m vtoken_sglang_eval.bench.hook_overhead --figures docs/results/serve.json --out FILE

`eval run --config serve` serves one arm for most of a minute, then the other, so whatever the
machine does in between is part of their ratio. Here a native and a hook-only server run side by
side and get the same few conversations in turn, the idle one asleep; the order commits from round
to round, and a ratio is taken within a round. Servers are started anew `--pairs` times, since two
processes of one program differ a little for as long as they live. The default takes 15 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vtoken_sglang_eval import provenance
from vtoken_sglang_eval.cell import flush_cache, measure, warm_up
from vtoken_sglang_eval.config import make_config, read_config_file, with_default_model
from vtoken_sglang_eval.figures import write_figures
from vtoken_sglang_eval.results import rounded
from vtoken_sglang_eval.run import (
    Prepared,
    arm_command,
    arm_environment,
    describe,
    prepare,
)
from vtoken_sglang_eval.serve_figures import serve_figures
from vtoken_sglang_eval.server import ServerProcess, free_port

from vtoken_sglang.errors import VTokenError

MODULE = "vtoken_sglang_eval.bench.hook_overhead"
SMALL = {"conversations": 4, "turns": 3, "concurrency": 4}


def serve_pair(prepared: Prepared, pair: int, rounds: int) -> list[dict[str, Any]]:
    """Both servers, `rounds` rounds of every arm; the runs as plain data, repeats counted on."""
    runs: list[dict[str, Any]] = []
    config = prepared.config
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for arm in prepared.arms:
            port = free_port()
            servers[arm.name] = stack.enter_context(
                ServerProcess(
                    arm_command(config, arm, port),
                    port,
                    folder / f"{arm.name}.log",
                    arm_environment(config, arm),
                    config.startup_timeout,
                )
            )
        for server in servers.values():
            warm_up(server, prepared.workload, config)
        for turn in range(rounds):
            # Forth and back, so that a drift of the machine favours nobody.
            order = prepared.arms if (pair + turn) % 2 == 0 else prepared.arms[::-1]
            for arm in order:
                server = servers[arm.name]
                flush_cache(server.base_url, tries=20)
                found = measure(
                    server,
                    prepared.workload,
                    arm,
                    config,
                    prepared.tokenizer,
                    options={},
                    look=False,
                    kv_bytes=0,
                    folder=folder,
                )
                run = {
                    "arm": arm.name,
                    "repeat": pair * rounds + turn,
                    "command": provenance.portable_command(arm_command(config, arm, 0)),
                    "startup_s": server.startup_s,
                    "load_average_before": os.getloadavg()[0],
                    **found,
                }
                runs.append(run)
                summary = run["summary"]
                print(
                    f"{pair + 1}.{turn + 1} {arm.name}: {summary['duration_s']:.2f} s, "
                    f"{summary['server_cpu_ms_per_token']:.1f} CPU ms per token",
                    flush=True,
                )
    return runs


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="result file, all runs")
    parser.add_argument("--figures", type=Path, help="figures file, topic serve")
    parser.add_argument("--pairs", type=int, default=3, help="times both servers are started")
    parser.add_argument("--rounds", type=int, default=10, help="rounds per pair of servers")
    parser.add_argument("--force", action="store_true", help="replace a larger measurement")
    chosen = parser.parse_args(words)
    arguments = sys.argv[1:] if words is None else list(words)
    command = provenance.portable_command(["python", "-m", MODULE, *arguments])
    try:
        config = make_config("run", read_config_file("serve"), dict(SMALL))
        config = with_default_model(config)
        prepared = prepare(replace(config, repeats=chosen.pairs * chosen.rounds))
        started = datetime.now(UTC)
        origin = {"command": command, **provenance.origin(prepared.config.device)}
        runs = [
            run for pair in range(chosen.pairs) for run in serve_pair(prepared, pair, chosen.rounds)
        ]
        result = describe(prepared, origin, started, runs)
        figures = serve_figures(result)
        figures["settings"]["servers"] = f"{chosen.pairs} pairs, both up, taking turns"
        chosen.out.write_text(json.dumps(rounded(result), indent=1) + "\n", encoding="utf-8")
        if chosen.figures:
            write_figures(chosen.figures, figures, chosen.force)
    except VTokenError as error:
        print(error, file=sys.stderr)
        return 2
    for name, figure in sorted(figures["figures"].items()):
        spread = figure["spread"]
        print(f"{name:32} {figure['value']:.4f} [{spread['q1']:.4f}, {spread['q3']:.4f}]")
    for check in result["tokens"]["arms"]:
        print(check)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
